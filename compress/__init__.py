"""compress: codecs for what crosses slow links."""
