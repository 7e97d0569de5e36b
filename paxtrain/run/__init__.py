"""What a training run leaves behind: checkpoints, metrics, tables and plots.

May import `paxtrain.config` and `paxtrain.parallel`.
"""
