"""The safetensors format and the disk tier: files only, no array library."""
