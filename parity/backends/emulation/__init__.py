"""The rounding of matrix units, put back into interpreters that compute float32 dots in full float32."""
