{{/* The environment of a role's container: what the chart knows, then the settings, then what the user adds. */}}

{{- define "sluice.env" -}}
{{- $root := .root }}{{- $name := .name }}{{- $role := .role }}
{{- $prefix := printf "SLUICE_%s_" (upper $name) }}
{{- $isPod := ne $name "router" }}
- {name: HOME, value: /tmp}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- {name: {{ $prefix }}MODEL_DIR, value: {{ include "sluice.modelDir" $root | quote }}}
- {name: {{ $prefix }}LISTEN, value: "0.0.0.0:{{ $role.port }}"}
- {name: {{ $prefix }}DRAIN_S, value: {{ $role.drain.seconds | int | quote }}}
{{- if $isPod }}
- {name: {{ $prefix }}ADVERTISE, value: "$(POD_IP):{{ $role.port }}"}
{{- if $root.Values.metrics.enabled }}
- {name: {{ $prefix }}METRICS_LISTEN, value: "0.0.0.0:{{ $root.Values.metrics.port }}"}
{{- end }}
{{- else if $root.Values.model.name }}
- {name: {{ $prefix }}MODEL_NAME, value: {{ $root.Values.model.name | quote }}}
{{- end }}
{{- if ne $name "prefill" }}
{{- include "sluice.discoveryEnv" (dict "root" $root "name" $name "prefix" $prefix) }}
{{- end }}
{{- if $root.Values.tls.enabled }}
- {name: {{ $prefix }}TLS_CERT, value: /etc/sluice/tls/tls.crt}
- {name: {{ $prefix }}TLS_KEY, value: /etc/sluice/tls/tls.key}
- {name: {{ $prefix }}TLS_CA, value: /etc/sluice/tls/ca.crt}
{{- if $isPod }}
- {name: {{ $prefix }}HEALTH_LISTEN, value: "0.0.0.0:{{ $root.Values.tls.healthPort }}"}
{{- end }}
{{- end }}
{{- if and (not $isPod) $root.Values.tls.http.secret }}
- {name: {{ $prefix }}HTTP_TLS_CERT, value: /etc/sluice/https/tls.crt}
- {name: {{ $prefix }}HTTP_TLS_KEY, value: /etc/sluice/https/tls.key}
{{- end }}
{{- if and (not $isPod) $root.Values.auth.secret }}
- {name: {{ $prefix }}API_KEYS_FILE, value: /etc/sluice/keys/{{ $root.Values.auth.key }}}
{{- end }}
{{- if $isPod }}
{{- include "sluice.nixlEnv" $root.Values.nixl }}
{{- end }}
{{- $settings := $role.settings }}
{{- if $isPod }}
{{- $auto := ternary (dict "device" "cuda") dict (gt (int $role.gpu.count) 0) }}
{{- $settings = mergeOverwrite $auto (deepCopy $root.Values.engine) $role.settings }}
{{- end }}
{{- range $key, $value := $settings }}
- {name: {{ $prefix }}{{ upper $key }}, value: {{ include "sluice.scalar" $value | quote }}}
{{- end }}
{{- with $role.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "sluice.discoveryEnv" -}}
{{- $discovery := .root.Values.discovery }}
- {name: {{ .prefix }}DISCOVERY, value: {{ $discovery.kind | quote }}}
{{- if eq $discovery.kind "kubernetes" }}
- name: {{ .prefix }}DISCOVERY_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- {name: {{ .prefix }}DISCOVERY_SELECTOR, value: "app.kubernetes.io/name={{ include "sluice.name" .root }},app.kubernetes.io/instance={{ .root.Release.Name }}"}
{{- else if eq .name "router" }}
- {name: {{ .prefix }}DECODES, value: {{ join "," $discovery.decodes | quote }}}
- {name: {{ .prefix }}PREFILLS, value: {{ join "," $discovery.prefills | quote }}}
{{- else }}
- {name: {{ .prefix }}PEERS, value: {{ join "," $discovery.prefills | quote }}}
{{- end }}
{{- end }}

{{- define "sluice.nixlEnv" }}
- {name: UCX_TCP_PORT_RANGE, value: "{{ .ports.from }}-{{ .ports.to }}"}
{{- with .tls }}
- {name: UCX_TLS, value: {{ . | quote }}}
{{- end }}
{{- with .netDevices }}
- {name: UCX_NET_DEVICES, value: {{ . | quote }}}
{{- end }}
{{- with .env }}
{{ toYaml . }}
{{- end }}
{{- end }}
