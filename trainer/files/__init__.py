"""Files that are whole or absent: atomic writes, safetensors, folders built once."""
