{{- /* Puts the default back where a value is null or missing (tooling/defaults.py says when); every template begins with this. */ -}}
{{- define "ddp-operator.complete" -}}
{{- range $path, $default := .Files.Get "files/defaults.yaml" | fromYaml -}}
{{- $place := $.Values -}}
{{- $names := splitList "." $path -}}
{{- range initial $names -}}
{{- if not (kindIs "map" (index $place .)) -}}{{- $_ := set $place . dict -}}{{- end -}}
{{- $place = index $place . -}}
{{- end -}}
{{- if kindIs "invalid" (index $place (last $names)) -}}{{- $_ := set $place (last $names) $default -}}{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Refuses a missing namespace before any object is created. Without a cluster (helm template) nothing can be looked up.
The release's own namespace may be missing too: `--create-namespace` creates it after the templates are rendered. */ -}}
{{- define "ddp-operator.requireNamespaces" -}}
{{- if and .Values.namespaces (or (lookup "v1" "Namespace" "" .Release.Namespace) (lookup "v1" "Namespace" "" "default")) -}}
{{- range without .Values.namespaces .Release.Namespace -}}
{{- if not (lookup "v1" "Namespace" "" .) -}}
{{- fail (printf "namespaces: namespace %s does not exist; create it first: kubectl create namespace %s" . .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "ddp-operator.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- /* The release's name, with the chart's unless it holds that already: `helm install ddp-operator` names all plainly. */ -}}
{{- define "ddp-operator.fullname" -}}
{{- $name := include "ddp-operator.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "ddp-operator.selector" -}}
app.kubernetes.io/name: {{ include "ddp-operator.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- /* Labels of an object, without the component: a test's objects are not the operator's. */ -}}
{{- define "ddp-operator.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/name: {{ include "ddp-operator.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: ddp-operator
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "ddp-operator.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "ddp-operator.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name: name an existing account, or set serviceAccount.create=true" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- /* An image of the chart's registry: list CONTEXT REPOSITORY TAG DIGEST. */ -}}
{{- define "ddp-operator.imageName" -}}
{{- $context := index . 0 -}}
{{- $repository := index . 1 -}}
{{- $registry := default $context.Values.image.registry $context.Values.global.imageRegistry -}}
{{- with $registry }}{{ $repository = printf "%s/%s" . $repository }}{{ end -}}
{{- if index . 3 -}}
{{- printf "%s@%s" $repository (index . 3) -}}
{{- else -}}
{{- printf "%s:%s" $repository (default $context.Chart.AppVersion (index . 2)) -}}
{{- end -}}
{{- end -}}

{{- define "ddp-operator.image" -}}
{{- include "ddp-operator.imageName" (list . .Values.image.repository .Values.image.tag .Values.image.digest) -}}
{{- end -}}

{{- /* Where `helm test` submits its job: the release's namespace if it is served, else the first that is. */ -}}
{{- define "ddp-operator.testNamespace" -}}
{{- if or (empty .Values.namespaces) (has .Release.Namespace .Values.namespaces) -}}
{{- .Release.Namespace -}}
{{- else -}}
{{- first .Values.namespaces -}}
{{- end -}}
{{- end -}}

{{- define "ddp-operator.testImage" -}}
{{- if .Values.tests.image -}}
{{- .Values.tests.image -}}
{{- else -}}
{{- include "ddp-operator.imageName" (list . "ddp-operator/trainer" "" .Values.tests.digest) -}}
{{- end -}}
{{- end -}}

{{- /* What the restricted Pod Security Standard asks of a container. */ -}}
{{- define "ddp-operator.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
readOnlyRootFilesystem: true
{{- end -}}

{{- define "ddp-operator.podSecurity" -}}
runAsNonRoot: true
{{- with .Values.runAsUser }}
runAsUser: {{ . }}
runAsGroup: {{ . }}
fsGroup: {{ . }}
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}
