"""The Llama-like architectures on megatron-core. Imported by ranks and converters only, never by the driver."""
