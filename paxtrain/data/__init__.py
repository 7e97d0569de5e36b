"""Training data: corpora of text, tokenizers, token files made from them, data sets and mixtures of those.

text_files.py corpus.py              texts of files; documents, some of them held out
preparation.py                       token files made from them
tokenizer.py settings.py             tokenizers; what begins and ends documents
token_files.py                       token files, and the stream of samples read from them
checksums.py                         checksums of token files
documents.py                         lengths of documents, and the balance of devices that share sequences
streams.py                           text that is tokenized while a run trains
mixture.py datasets.py               weighted mixtures; the data sets of a run
"""
