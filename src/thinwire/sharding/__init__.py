"""A worker whose model is sharded over several processes (FSDP2)."""
