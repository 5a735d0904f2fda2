{{/* Names, labels and small conversions. */}}

{{- define "sluice.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "sluice.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else if contains (include "sluice.name" .) .Release.Name }}
{{- .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "sluice.name" .) | trunc 50 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* What finds this release's pods, of any role. */}}
{{- define "sluice.selectorLabels" -}}
app.kubernetes.io/name: {{ include "sluice.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "sluice.labels" -}}
{{ include "sluice.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "sluice.roleLabels" -}}
{{ include "sluice.labels" .root }}
app.kubernetes.io/component: {{ .name }}
{{- end }}

{{- define "sluice.roleSelector" -}}
{{ include "sluice.selectorLabels" .root }}
app.kubernetes.io/component: {{ .name }}
{{- end }}

{{/* The values of a role: its own over the common ones. As YAML; read it with fromYaml. */}}
{{- define "sluice.role" -}}
{{- mergeOverwrite (deepCopy .root.Values.common) (deepCopy (index .root.Values .name)) | toYaml }}
{{- end }}

{{- define "sluice.image" -}}
{{- with .Values.image }}
{{- if .digest }}
{{- printf "%s@%s" .repository .digest }}
{{- else }}
{{- printf "%s:%s" .repository (.tag | default $.Chart.AppVersion) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "sluice.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "sluice.fullname" .) "default" .Values.serviceAccount.create) }}
{{- end }}

{{/* A setting's value as text: whole numbers without an exponent. */}}
{{- define "sluice.scalar" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) }}{{ printf "%.0f" . }}{{ else }}{{ . }}{{ end }}
{{- end }}

{{- define "sluice.modelDir" -}}
{{- if eq .Values.model.source "builtin" -}}
/opt/sluice/models/{{ .Values.model.builtin }}
{{- else -}}
{{ printf "/models/%s" .Values.model.path | trimSuffix "/" }}
{{- end }}
{{- end }}

{{/* Seconds from SIGTERM's announcement to SIGKILL. */}}
{{- define "sluice.grace" -}}
{{- with .drain }}{{ .graceSeconds | default (add .preStopSeconds .seconds 10) | int }}{{ end }}
{{- end }}

{{- define "sluice.tlsSecret" -}}
{{- index .root.Values.tls.secrets .name | default (printf "%s-%s-tls" (include "sluice.fullname" .root) .name) }}
{{- end }}

{{- define "sluice.imexClaim" -}}
{{- .Values.imex.claimTemplate | default (printf "%s-imex" (include "sluice.fullname" .)) }}
{{- end }}

{{- define "sluice.workloadKind" -}}
{{- if .multinode.enabled }}LeaderWorkerSet{{ else }}Deployment{{ end }}
{{- end }}

{{- define "sluice.workloadApi" -}}
{{- if .multinode.enabled }}leaderworkerset.x-k8s.io/v1{{ else }}apps/v1{{ end }}
{{- end }}

{{- define "sluice.routerUrl" -}}
{{- printf "%s://%s-router:%d" (ternary "https" "http" (ne .Values.tls.http.secret "")) (include "sluice.fullname" .) (int .Values.router.service.port) }}
{{- end }}
