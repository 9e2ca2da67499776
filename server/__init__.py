"""The HTTP side: OpenAI protocol, pictures, streaming, command line. Arrows point down: server -> engine -> model."""

VERSION = "0.1.0"
