{{/*
Alive asks the process alone. Ready asks for a peer too: of decode that a canary has crossed from a prefill pod, of
prefill that a decode pod has agreed. So a rolling update that changes the layout takes an old pod away only once a new
pair stands, and one of a single role stops instead of breaking the service.
*/}}

{{- define "sluice.probes" -}}
{{- $probes := .role.probes }}
startupProbe:
  {{- include "sluice.probe" (merge (dict "service" "") .) | nindent 2 }}
  {{- toYaml $probes.startup | nindent 2 }}
livenessProbe:
  {{- include "sluice.probe" (merge (dict "service" "") .) | nindent 2 }}
  {{- toYaml $probes.liveness | nindent 2 }}
readinessProbe:
  {{- include "sluice.probe" (merge (dict "service" (ternary "sluice.layout" "sluice.v1.Decode" (eq .name "prefill")) "ready" true) .) | nindent 2 }}
  {{- toYaml $probes.readiness | nindent 2 }}
{{- end }}

{{- define "sluice.probe" -}}
{{- $port := .role.port }}
{{- if .root.Values.tls.enabled }}{{ $port = .root.Values.tls.healthPort }}{{ end }}
{{- if eq .name "router" -}}
httpGet: {path: {{ ternary "/ready" "/health" (eq .ready true) }}, port: http, scheme: {{ ternary "HTTPS" "HTTP" (ne .root.Values.tls.http.secret "") }}}
{{- else if eq .role.probes.kind "grpc" -}}
grpc: {port: {{ $port }}{{ with .service }}, service: {{ . }}{{ end }}}
{{- else if eq .role.probes.kind "http" -}}
httpGet: {path: {{ ternary "/ready" "/live" (eq .ready true) }}, port: metrics}
{{- else -}}
exec: {command: [python, -m, sluice.rpc.probe, "127.0.0.1:{{ $port }}"{{ with .service }}, {{ . }}{{ end }}]}
{{- end }}
{{- end }}
