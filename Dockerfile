# VL2 on a GPU host:
#   docker build -t vl2 .
#   docker run --gpus all -p 8000:8000 -v vl2-models:/models vl2 --model deepseek-ai/deepseek-vl2-small
# Without --model it serves the embedded demo; without --gpus it serves on the CPU.
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-runtime-ubuntu24.04
FROM ${CUDA_IMAGE}

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3 python3-venv gcc python3-dev \
    && rm -rf /var/lib/apt/lists/*
# gcc and the Python headers: Triton compiles its launcher on first use.

RUN useradd --create-home --uid 10001 vl2 \
    && mkdir -p /opt/vl2 /models && chown vl2:vl2 /opt/vl2 /models
USER vl2
WORKDIR /opt/vl2
# Docker kills what has not ended 10 s after it was told to: running answers get 5 of them. For more, give both:
#   docker run --stop-timeout 70 -e VL2_SHUTDOWN_TIMEOUT=60 ...
ENV PATH=/opt/vl2/.venv/bin:$PATH \
    HF_HOME=/models \
    PYTHONUNBUFFERED=1 \
    VL2_SHUTDOWN_TIMEOUT=5

# The dependencies first, so that a change of the code does not install them again.
COPY --chown=vl2:vl2 pyproject.toml constraints.txt README.md LICENSE ./
RUN mkdir -p server model kernels && touch server/__init__.py model/__init__.py kernels/__init__.py \
    && python3 -m venv .venv \
    && pip install --no-cache-dir -c constraints.txt -e '.[cuda]'

COPY --chown=vl2:vl2 . .

VOLUME /models
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["vl2", "serve", "--host", "0.0.0.0", "--port", "8000"]
