"""A text that is hard to encode and to decode."""

TRICKY = "Grüße,\r\n\tworld\x00\x1f  <|endoftext|>   漢字 \u2028\u00a0 don't 👩‍🚀\n\n \n x" + "  y\n" * 50
