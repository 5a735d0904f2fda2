{{/* What the schema can't say: values that contradict each other, in sentences. Every one is reported, not the first. */}}

{{- define "sluice.validate" -}}
{{- $problems := list }}
{{- $model := .Values.model }}
{{- if and (eq $model.source "pvc") (not $model.pvc.claimName) }}
{{- $problems = append $problems "model.source is pvc, but model.pvc.claimName is empty. Name the claim that holds the checkpoint." }}
{{- end }}
{{- if and (eq $model.source "hostPath") (not $model.hostPath) }}
{{- $problems = append $problems "model.source is hostPath, but model.hostPath is empty. Give the folder on the nodes that holds the checkpoint." }}
{{- end }}
{{- if and (eq $model.source "download") (or (not $model.download.image) (not $model.download.command)) }}
{{- $problems = append $problems "model.source is download, but model.download.image or .command is empty. Say what fetches the checkpoint into /models." }}
{{- end }}
{{- if and (eq .Values.discovery.kind "static") (or (not .Values.discovery.decodes) (not .Values.discovery.prefills)) }}
{{- $problems = append $problems "discovery.kind is static, but discovery.decodes or discovery.prefills is empty. List host:port of every pod, or use kubernetes." }}
{{- end }}
{{- with .Values.tls }}
{{- if and .enabled .certManager.enabled (not .certManager.issuerRef.name) }}
{{- $problems = append $problems "tls.certManager is enabled, but tls.certManager.issuerRef.name is empty. Name the issuer that signs the pods' certificates." }}
{{- end }}
{{- if and .enabled (not .certManager.enabled) (not (and .secrets.router .secrets.prefill .secrets.decode .secrets.operator)) }}
{{- $problems = append $problems "tls is enabled without cert-manager, so tls.secrets needs a Secret for router, prefill, decode and operator, each with tls.crt, tls.key and ca.crt." }}
{{- end }}
{{- if and (not .enabled) .certManager.enabled }}
{{- $problems = append $problems "tls.certManager is enabled, but tls.enabled is false: certificates would be made and not used. Set tls.enabled." }}
{{- end }}
{{- end }}
{{- if and .Values.imex.enabled (not .Values.imex.create) (not .Values.imex.claimTemplate) }}
{{- $problems = append $problems "imex.create is false, but imex.claimTemplate is empty. Name the ResourceClaimTemplate of the existing ComputeDomain." }}
{{- end }}
{{- if ge (int .Values.nixl.ports.from) (int .Values.nixl.ports.to) }}
{{- $problems = append $problems (printf "nixl.ports.from is %d and nixl.ports.to is %d. The range must go upwards." (int .Values.nixl.ports.from) (int .Values.nixl.ports.to)) }}
{{- end }}
{{- if and .Values.inferencePool.enabled (not .Values.inferencePool.endpointPicker.name) }}
{{- $problems = append $problems "inferencePool is enabled, but inferencePool.endpointPicker.name is empty. Name the endpoint picker's Service." }}
{{- end }}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) }}
{{- $problems = append $problems "httpRoute is enabled, but httpRoute.parentRefs is empty. Name the Gateway it belongs to." }}
{{- end }}
{{- if and .Values.ingress.enabled (not .Values.ingress.hosts) }}
{{- $problems = append $problems "ingress is enabled, but ingress.hosts is empty. Give at least one host." }}
{{- end }}
{{- if and .Values.metrics.podMonitor.enabled .Values.auth.secret (not .Values.auth.clientSecret) }}
{{- $problems = append $problems "metrics.podMonitor is enabled and the router asks for API keys, but auth.clientSecret is empty: the router would refuse the scrape. Name a Secret with an operator's key." }}
{{- end }}
{{- if and .Values.metrics.podMonitor.enabled (not .Values.metrics.enabled) }}
{{- $problems = append $problems "metrics.podMonitor is enabled, but metrics.enabled is false: there would be nothing to scrape." }}
{{- end }}
{{- if and (not .Values.serviceAccount.create) (not .Values.serviceAccount.name) (eq .Values.discovery.kind "kubernetes") }}
{{- $problems = append $problems "serviceAccount.create is false, but serviceAccount.name is empty. Name an account that may read pods, or let the chart make one." }}
{{- end }}
{{- $oldest := .Values.minimumKubernetes }}
{{- if semverCompare (printf "<%s-0" $oldest) .Capabilities.KubeVersion.Version }}
{{- $problems = append $problems (printf "Kubernetes is %s, the chart needs %s or newer. Set minimumKubernetes only if you know what your server lacks." .Capabilities.KubeVersion.Version $oldest) }}
{{- end }}
{{- range $name := list "router" "prefill" "decode" }}
{{- $problems = concat $problems (include "sluice.roleProblems" (dict "root" $ "name" $name) | fromYamlArray) }}
{{- end }}
{{- if $problems }}
{{- fail (printf "\n\nThese values can't work:\n  - %s\n" (join "\n  - " $problems)) }}
{{- end }}
{{- end }}

{{- define "sluice.roleProblems" -}}
{{- $role := include "sluice.role" . | fromYaml }}{{- $name := .name }}{{- $values := .root.Values }}
{{- $problems := list }}
{{- $needed := add (int $role.drain.preStopSeconds) (int $role.drain.seconds) }}
{{- if lt (int (include "sluice.grace" $role)) (int $needed) }}
{{- $problems = append $problems (printf "%s.drain.graceSeconds is %d, less than preStopSeconds + seconds = %d: pods would be killed in mid-drain. Raise it, or set 0." $name (int $role.drain.graceSeconds) (int $needed)) }}
{{- end }}
{{- with $role.autoscaling }}
{{- if and (ne .kind "none") (gt (int .minReplicas) (int .maxReplicas)) }}
{{- $problems = append $problems (printf "%s.autoscaling.minReplicas is %d, more than maxReplicas %d." $name (int .minReplicas) (int .maxReplicas)) }}
{{- end }}
{{- if and (ne .kind "none") (ne $name "router") (not $values.metrics.enabled) }}
{{- $problems = append $problems (printf "%s.autoscaling looks at the pods' metrics, but metrics.enabled is false." $name) }}
{{- end }}
{{- end }}
{{- if and (eq $role.probes.kind "http") (ne $name "router") (not $values.metrics.enabled) }}
{{- $problems = append $problems (printf "%s.probes.kind is http, which asks the metrics port, but metrics.enabled is false. Enable it, or take grpc." $name) }}
{{- end }}
{{- if eq $name "router" }}
{{- if $role.multinode.enabled }}
{{- $problems = append $problems "router.multinode is enabled; a router is one process. Raise router.replicas instead." }}
{{- end }}
{{- if gt (int $role.gpu.count) 0 }}
{{- $problems = append $problems (printf "router.gpu.count is %d; the router computes nothing and would hold GPUs idle. Set gpu under prefill and decode." (int $role.gpu.count)) }}
{{- end }}
{{- else }}
{{- $settings := mergeOverwrite (deepCopy $values.engine) $role.settings }}
{{- if and (gt (int $role.gpu.count) 0) (eq (get $settings "device" | toString) "cpu") }}
{{- $problems = append $problems (printf "%s.gpu.count is %d, but its device is cpu: GPUs would be held and not used. Set device to cuda, or count to 0." $name (int $role.gpu.count)) }}
{{- end }}
{{- $ranks := int (get $settings "tp" | default 1) }}
{{- if and (gt (int $role.gpu.count) 0) (ne (int $role.gpu.count) $ranks) }}
{{- $problems = append $problems (printf "%s.gpu.count is %d, but its engine has %d ranks (setting tp), each on a GPU of its own. Make them equal." $name (int $role.gpu.count) $ranks) }}
{{- end }}
{{- if and $role.rdma.asRoot (not $role.rdma.enabled) }}
{{- $problems = append $problems (printf "%s.rdma.asRoot is true, but rdma.enabled is false: nothing needs root. Set rdma.enabled, or asRoot to false." $name) }}
{{- end }}
{{- end }}
{{- toYaml $problems }}
{{- end }}
