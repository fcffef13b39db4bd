# holdfast with the CPU build of torch, built from this checkout:
#   docker build -t holdfast . && docker run --rm --shm-size 2g holdfast demo
# Snapshots are in shared memory, of which a container has 64 MiB unless --shm-size gives more.
FROM python:3.11-slim-bookworm AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY constraints.txt ./
RUN python -m venv /opt/holdfast \
    && /opt/holdfast/bin/pip install --no-cache-dir --constraint constraints.txt \
        torch numpy rich safetensors argcomplete prometheus_client setuptools wheel ninja
COPY . .
RUN PATH="/opt/holdfast/bin:$PATH" /opt/holdfast/bin/pip install --no-cache-dir \
        --no-build-isolation --no-deps .

FROM python:3.11-slim-bookworm
COPY --from=build /opt/holdfast /opt/holdfast
RUN useradd --create-home holdfast
USER holdfast
WORKDIR /home/holdfast
ENV PATH="/opt/holdfast/bin:$PATH"
ENTRYPOINT ["holdfast"]
CMD ["--help"]
