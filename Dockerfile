# Serves a released run folder, mounted at /run-folder:
#   docker build -t dpformer .
#   docker run -p 8000:8000 -e DPFORMER_TOKEN -v "$PWD/runs/first:/run-folder:ro" dpformer
FROM python:3.11-slim
WORKDIR /app
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src ./src
# The default build of torch brings gigabytes of CUDA: pass the index of its CPU builds as --build-arg PIP_EXTRA_INDEX_URL=...
ARG PIP_EXTRA_INDEX_URL
RUN pip install --no-cache-dir -c constraints.txt '.[serve]' \
    && useradd --system dpformer
USER dpformer
EXPOSE 8000
HEALTHCHECK --interval=30s CMD python -c "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/readyz', timeout=3)"
ENTRYPOINT ["dpformer", "serve", "/run-folder", "--host", "0.0.0.0", "--port", "8000", "--watch"]
