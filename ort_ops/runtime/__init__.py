"""What compiled kernels run on: onnxruntime's C interface, Numba, LLVM and the processor. Nothing of operators."""
