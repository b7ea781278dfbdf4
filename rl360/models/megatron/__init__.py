"""The Llama-like architectures on megatron-core. Imported by training ranks and converters only, never by the driver."""
