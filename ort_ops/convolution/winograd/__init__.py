"""Convolutions by 3×3 with stride 1 and their gradients, through Winograd's tiles."""
