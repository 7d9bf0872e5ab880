"""Files and peers that are hostile or damaged."""
