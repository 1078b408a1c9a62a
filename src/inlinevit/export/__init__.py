"""Export: models as ONNX files or OpenVINO models, checked against torch, and quantized."""
