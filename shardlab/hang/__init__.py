"""Why another framework's job hangs: PyTorch's flight recorder, read without PyTorch."""
