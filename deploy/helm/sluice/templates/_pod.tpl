{{/* The pod of a role. Called with root, name, role, and component (differs from name for a group's workers). */}}

{{- define "sluice.podTemplate" -}}
{{- $root := .root }}{{- $name := .name }}{{- $role := .role }}
metadata:
  labels:
    {{- include "sluice.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
    {{- with $role.labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $role.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "sluice.serviceAccount" $root }}
  automountServiceAccountToken: {{ and (eq $root.Values.discovery.kind "kubernetes") (ne $name "prefill") }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "sluice.grace" $role }}
  securityContext:
    {{- include "sluice.podSecurityContext" $role | nindent 4 }}
  {{- with include "sluice.placement" . | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with include "sluice.claims" (dict "root" $root "role" $role "name" $name) | fromYamlArray }}
  resourceClaims:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with include "sluice.initContainers" . | trim }}
  initContainers:
    {{- . | nindent 4 }}
  {{- end }}
  containers:
    - {{ include "sluice.container" . | nindent 6 | trim }}
      ports:
        {{- if eq $name "router" }}
        - {name: http, containerPort: {{ $role.port }}, protocol: TCP}
        {{- else }}
        - {name: grpc, containerPort: {{ $role.port }}, protocol: TCP}
        {{- if $root.Values.tls.enabled }}
        - {name: health, containerPort: {{ $root.Values.tls.healthPort }}, protocol: TCP}
        {{- end }}
        {{- if $root.Values.metrics.enabled }}
        - {name: metrics, containerPort: {{ $root.Values.metrics.port }}, protocol: TCP}
        {{- end }}
        {{- end }}
      {{- if eq .component $name }}
      {{- include "sluice.probes" . | trim | nindent 6 }}
      {{- end }}
      lifecycle:
        preStop:
          exec: {command: [sleep, {{ $role.drain.preStopSeconds | int | quote }}]}
    {{- with $role.sidecars }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "sluice.volumes" . | trim | nindent 4 }}
{{- end }}

{{/* Image, security, environment, resources and mounts: what a role's container and its preflight have in common. */}}
{{- define "sluice.containerBase" -}}
image: {{ include "sluice.image" .root | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  {{- include "sluice.securityContext" (dict "role" .role "name" .name) | nindent 2 }}
env:
  {{- include "sluice.env" . | trim | nindent 2 }}
{{- with .role.envFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with include "sluice.resources" . | fromYaml }}
resources:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumeMounts:
  {{- include "sluice.mounts" . | nindent 2 }}
{{- end }}

{{- define "sluice.container" -}}
name: {{ .name }}
command: [python, -m, services.{{ .name }}]
{{ include "sluice.containerBase" . }}
{{- end }}

{{- define "sluice.initContainers" -}}
{{- $root := .root }}{{- $download := $root.Values.model.download }}
{{- if eq $root.Values.model.source "download" }}
- name: download
  image: {{ $download.image | quote }}
  command: {{ toJson $download.command }}
  securityContext:
    {{- toYaml .role.securityContext | nindent 4 }}
  {{- with $download.env }}
  env:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $download.envFrom }}
  envFrom:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  volumeMounts:
    - {name: model, mountPath: /models}
    - {name: tmp, mountPath: /tmp}
{{- end }}
{{- if and .role.preflight.enabled (ne .name "router") }}
- name: preflight
  command: [sluice, preflight, --role, {{ .name }}{{ with $root.Values.model.digest }}, --digest, {{ . | quote }}{{ end }}{{ if .role.rdma.enabled }}, --rdma{{ end }}{{ if $root.Values.imex.enabled }}, --imex{{ end }}]
  {{- include "sluice.containerBase" . | nindent 2 }}
{{- end }}
{{- with .role.initContainers }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "sluice.podSecurityContext" -}}
{{- if and .rdma.enabled .rdma.asRoot }}
{{- toYaml (mergeOverwrite (deepCopy .podSecurityContext) (dict "runAsNonRoot" false "runAsUser" 0 "runAsGroup" 0)) }}
{{- else }}
{{- toYaml .podSecurityContext }}
{{- end }}
{{- end }}

{{- define "sluice.securityContext" -}}
{{- if and .role.rdma.enabled (ne .name "router") }}
{{- toYaml (mergeOverwrite (deepCopy .role.securityContext) (dict "capabilities" (dict "add" (list "IPC_LOCK")))) }}
{{- else }}
{{- toYaml .role.securityContext }}
{{- end }}
{{- end }}

{{/* The user's resources, GPUs, RDMA devices and claims in one block. */}}
{{- define "sluice.resources" -}}
{{- $resources := deepCopy .role.resources }}
{{- $devices := dict }}
{{- if gt (int .role.gpu.count) 0 }}
{{- $_ := set $devices .role.gpu.resource (int .role.gpu.count) }}
{{- end }}
{{- if and .role.rdma.enabled (ne .name "router") (gt (int .role.rdma.count) 0) }}
{{- $_ := set $devices .role.rdma.resource (int .role.rdma.count) }}
{{- end }}
{{- if $devices }}
{{- $resources = mergeOverwrite $resources (dict "limits" $devices "requests" (deepCopy $devices)) }}
{{- end }}
{{- with include "sluice.claims" . | fromYamlArray }}
{{- $names := list }}
{{- range . }}{{- $names = append $names (dict "name" .name) }}{{- end }}
{{- $_ := set $resources "claims" $names }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{- define "sluice.claims" -}}
{{- $claims := .role.resourceClaims }}
{{- if and .root.Values.imex.enabled (ne .name "router") }}
{{- $claims = append $claims (dict "name" "imex" "resourceClaimTemplateName" (include "sluice.imexClaim" .root)) }}
{{- end }}
{{- toYaml $claims }}
{{- end }}

{{- define "sluice.placement" -}}
{{- $role := .role }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- range $key := list "priorityClassName" "runtimeClassName" "schedulerName" }}
{{- with index $role $key }}
{{ $key }}: {{ . }}
{{- end }}
{{- end }}
{{- if $role.hostIPC }}
hostIPC: true
{{- end }}
{{- $nodes := deepCopy $role.nodeSelector }}
{{- with $role.gpu.product }}
{{- $_ := set $nodes "nvidia.com/gpu.product" . }}
{{- end }}
{{- with $nodes }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with include "sluice.affinity" . | fromYaml }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $role.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $role.topologySpread }}
{{- $own := dict "labelSelector" (dict "matchLabels" (include "sluice.roleSelector" (dict "root" $.root "name" $.component) | fromYaml)) }}
topologySpreadConstraints:
  {{- range . }}
  - {{ toYaml (merge (deepCopy .) $own) | nindent 4 | trim }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Pods that share memory over NVLink must be in one NVLink domain: the first of them chooses it. */}}
{{- define "sluice.affinity" -}}
{{- $affinity := deepCopy .role.affinity }}
{{- $imex := .root.Values.imex }}
{{- if and $imex.enabled $imex.topologyKey (ne .name "router") }}
{{- $everyPod := dict "labelSelector" (dict "matchLabels" (include "sluice.selectorLabels" .root | fromYaml) "matchExpressions" (list (dict "key" "app.kubernetes.io/component" "operator" "In" "values" (list "prefill" "decode" "prefill-worker" "decode-worker")))) "topologyKey" $imex.topologyKey }}
{{- $affinity = mergeOverwrite (dict "podAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (list $everyPod))) $affinity }}
{{- end }}
{{- toYaml $affinity }}
{{- end }}

{{- define "sluice.mounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if .role.shm.size }}
- {name: shm, mountPath: /dev/shm}
{{- end }}
{{- if ne .root.Values.model.source "builtin" }}
- {name: model, mountPath: /models, readOnly: true}
{{- end }}
{{- if .root.Values.tls.enabled }}
- {name: tls, mountPath: /etc/sluice/tls, readOnly: true}
{{- end }}
{{- if and (eq .name "router") .root.Values.tls.http.secret }}
- {name: https, mountPath: /etc/sluice/https, readOnly: true}
{{- end }}
{{- if and (eq .name "router") .root.Values.auth.secret }}
- {name: keys, mountPath: /etc/sluice/keys, readOnly: true}
{{- end }}
{{- with .role.volumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "sluice.volumes" -}}
{{- $model := .root.Values.model }}
- {name: tmp, emptyDir: {}}
{{- with .role.shm.size }}
- {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ . }}}}
{{- end }}
{{- if eq $model.source "pvc" }}
- {name: model, persistentVolumeClaim: {claimName: {{ $model.pvc.claimName }}, readOnly: true}}
{{- else if eq $model.source "hostPath" }}
- {name: model, hostPath: {path: {{ $model.hostPath }}, type: Directory}}
{{- else if eq $model.source "download" }}
- {name: model, emptyDir: {sizeLimit: {{ $model.download.size }}}}
{{- end }}
{{- if .root.Values.tls.enabled }}
- {name: tls, secret: {secretName: {{ include "sluice.tlsSecret" . }}, defaultMode: 0440}}
{{- end }}
{{- if and (eq .name "router") .root.Values.tls.http.secret }}
- {name: https, secret: {secretName: {{ .root.Values.tls.http.secret }}, defaultMode: 0440}}
{{- end }}
{{- if and (eq .name "router") .root.Values.auth.secret }}
- {name: keys, secret: {secretName: {{ .root.Values.auth.secret }}, defaultMode: 0440}}
{{- end }}
{{- with .role.volumes }}
{{ toYaml . }}
{{- end }}
{{- end }}
