"""Number formats: quantize, dequantize, pack, unpack, check; one file a format."""
