"""Triton kernels. A package of its own because SGLang imports every module beside `EntryClass`, Triton or not."""
