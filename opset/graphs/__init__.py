"""Models as graphs, for all rooms: walking them, their names, their order, changing them. It needs onnx alone."""
