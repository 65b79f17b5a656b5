"""The bundled prefill server's inside: prompts on the event loop, the model on a thread of its own."""
