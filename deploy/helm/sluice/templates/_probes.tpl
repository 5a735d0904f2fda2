{{/* Alive asks the process alone; ready asks for more: of decode that a canary has crossed from a prefill pod. */}}

{{- define "sluice.probes" -}}
{{- $probes := .role.probes }}
startupProbe:
  {{- include "sluice.probe" (merge (dict "service" "") .) | nindent 2 }}
  {{- toYaml $probes.startup | nindent 2 }}
livenessProbe:
  {{- include "sluice.probe" (merge (dict "service" "") .) | nindent 2 }}
  {{- toYaml $probes.liveness | nindent 2 }}
readinessProbe:
  {{- include "sluice.probe" (merge (dict "service" (printf "sluice.v1.%s" (title .name)) "ready" true) .) | nindent 2 }}
  {{- toYaml $probes.readiness | nindent 2 }}
{{- end }}

{{- define "sluice.probe" -}}
{{- if eq .name "router" -}}
httpGet: {path: {{ ternary "/ready" "/health" (eq .ready true) }}, port: http, scheme: {{ ternary "HTTPS" "HTTP" (ne .root.Values.tls.http.secret "") }}}
{{- else if eq (include "sluice.probeKind" .) "grpc" -}}
grpc: {port: {{ .role.port }}{{ with .service }}, service: {{ . }}{{ end }}}
{{- else -}}
exec: {command: [python, -m, sluice.rpc.probe, "127.0.0.1:{{ .role.port }}"{{ with .service }}, {{ . }}{{ end }}]}
{{- end }}
{{- end }}

{{/* The kubelet's gRPC probe has no client certificate. */}}
{{- define "sluice.probeKind" -}}
{{- if .root.Values.tls.enabled }}exec{{ else }}{{ .role.probes.kind }}{{ end }}
{{- end }}
