"""Models from and to Hugging Face's layout.

May import `config`, `model`, `data` and `run`.
"""
