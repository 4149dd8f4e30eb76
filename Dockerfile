# The lessons in a container, on virtual GPUs, with PyTorch's CPU build:
#   docker build --tag multi-gpu . && docker run --rm --publish 8888:8888 multi-gpu
FROM python:3.13-slim
RUN apt-get update && apt-get install --yes --no-install-recommends git && rm -rf /var/lib/apt/lists/*
RUN python -m pip install --no-cache-dir uv
WORKDIR /course
COPY . .
RUN python -m uv pip install --system --no-cache --torch-backend=cpu -e ./virtual-gpus -e .
ENV GPUS=virtual OMP_NUM_THREADS=1
EXPOSE 8888
CMD ["jupyter", "lab", "notebooks", "--ip=0.0.0.0", "--no-browser", "--allow-root"]
