"""Architectures, one a file, whose name is the family (--config.model.family=llama). Nothing else names one."""
