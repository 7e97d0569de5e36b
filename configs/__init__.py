"""Configurations and clusters that come with paxtrain; `--config=gpt_8b` and `--cluster=h100_16x8` name them."""
