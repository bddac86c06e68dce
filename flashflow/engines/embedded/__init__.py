"""The embedded engine: any transformers causal LM, in this process, on CPU or CUDA."""
