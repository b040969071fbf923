"""Weight gradients as matrix products over the pixels."""
