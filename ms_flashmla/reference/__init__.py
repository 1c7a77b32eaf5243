"""What the layer is held against: a float64 reference (float64.py) and the same layer composed of MindSpore primitives (composed.py)."""
