"""Reads metrics by HTTP: check_metrics_server.py OPEN_PORT CLOSED_PORT TOKEN NAME VALUE"""

import sys
import urllib.error
import urllib.request

import prometheus_client.parser


def fetch(port, path="/metrics", token=None, method="GET"):
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers, method=method)
    with urllib.request.urlopen(request, timeout=10) as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4"), response.headers
        return response.read().decode()


def expect_status(status, *arguments, **options):
    try:
        fetch(*arguments, **options)
    except urllib.error.HTTPError as error:
        assert error.code == status, error
    else:
        raise AssertionError(f"no status {status}: {arguments}")


def main(open_port, closed_port, token, name, value):
    for port, own_token in ((open_port, None), (closed_port, token)):
        families = list(prometheus_client.parser.text_string_to_metric_families(fetch(port, token=own_token)))
        samples = {sample.name: sample.value for family in families for sample in family.samples}
        assert samples == {name: float(value)}, samples
    expect_status(404, open_port, "/")
    expect_status(401, closed_port)
    expect_status(401, closed_port, token=token[:-1] + "x")
    assert fetch(open_port, method="HEAD") == ""


if __name__ == "__main__":
    main(*sys.argv[1:])
