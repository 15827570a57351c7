#!/usr/bin/env bash
{% include "_header" %}
#
# The two secrets come from the environment: VLLM_API_KEY (clients send it as a bearer token), and HF_TOKEN
# where the hub asks for one. HOST and PORT move the address; beyond 127.0.0.1 a key is demanded. Arguments are passed on.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

HOST=${HOST:-127.0.0.1}
PORT=${PORT:-{{ d.port }}}
if [[ $HOST != 127.0.0.1 && -z ${VLLM_API_KEY:-} ]]; then
  echo "set VLLM_API_KEY: others can reach $HOST" >&2
  exit 2
fi

{% if d.method == "p-eagle" %}
# P-EAGLE runs on vLLM's first model runner only.
{% endif %}
{% for name, value in d.environment.items() %}
export {{ name }}={{ value | shell }}
{% endfor %}

# Health: /health. Metrics: /metrics, which prometheus.yml scrapes.
exec vllm serve {{ d.target | shell }} \
  --host "$HOST" --port "$PORT" \
{% for word in d.option_arguments %}
  {{ word | shell }} \
{% endfor %}
  "$@"
