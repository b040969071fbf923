"""Register kernels: vector code that several families of operators share.

May import `compiler`.
"""
