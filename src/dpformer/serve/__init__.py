"""A released model behind HTTP: an API, and a page to try it. Needs the extra `serve`.

limits       what a request may ask for
schema       requests and answers, as OpenAPI shows them
search       finding items by what people type
ranker       histories to ranked items, with filters, many at once
batcher      joins what is asked within a few milliseconds
metrics      for Prometheus
guard        body limit, time limit, one log line per request, no history in any of them
app          the routes
server       uvicorn, from start to graceful stop
page/        plain HTML, CSS and JavaScript
"""
