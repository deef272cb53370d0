"""What is placed: a model reference, its empty model, and the torch-free description planned with."""
