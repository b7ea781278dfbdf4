"""The embedded engine: a torch decoder that answers as an SGLang server does, in the trainer's own process."""
