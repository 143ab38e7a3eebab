{{- define "promptq.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "promptq.labels" -}}
app.kubernetes.io/name: promptq
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "promptq.selector" -}}
app.kubernetes.io/name: promptq
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- /* The image of a process; the argument is a list of the root and of values that replace it. */ -}}
{{- define "promptq.image" -}}
{{- $root := index . 0 -}}
{{- $own := index . 1 | default dict -}}
{{- $repository := $own.repository | default $root.Values.image.repository -}}
{{- $tag := $own.tag | default $root.Values.image.tag | default $root.Chart.AppVersion -}}
{{- /* The digest is of one image, so it is not for others. */ -}}
{{- $digest := ternary $own.digest $root.Values.image.digest (or $own.repository $own.tag $own.digest | empty | not) -}}
{{ $repository }}:{{ $tag }}{{ with $digest }}@{{ . }}{{ end }}
{{- end -}}

{{- /* The server's URL for a role's user; the argument is a list of the root and the role. */ -}}
{{- define "promptq.redisEnv" -}}
{{- $root := index . 0 -}}
{{- $role := index . 1 -}}
{{- $external := $root.Values.redis.external -}}
- name: PROMPTQ_REDIS_URL
  valueFrom:
    secretKeyRef:
{{- if $external.secret }}
      name: {{ $external.secret | quote }}
      key: {{ get ($external.secretKeys | default dict) $role | default $external.secretKey | quote }}
{{- else }}
      name: {{ include "promptq.name" $root }}-redis
      key: {{ ternary "url" $role (ne $external.url "") }}
{{- end }}
{{- end -}}

{{- /* A role's password comes from the administrator's, which no role can find from its own. */ -}}
{{- define "promptq.rolePassword" -}}
{{- printf "%s %s" (index . 0) (index . 1) | sha256sum | trunc 40 -}}
{{- end -}}

{{- define "promptq.hasOwnRedis" -}}
{{- if not (or .Values.redis.external.url .Values.redis.external.secret) }}yes{{ end -}}
{{- end -}}

{{- define "promptq.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "promptq.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- /* Longer than a drain and all that follows it. */ -}}
{{- define "promptq.graceSeconds" -}}
{{- add .Values.drainSeconds 40 -}}
{{- end -}}

{{- define "promptq.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* Pods start anew when the address that was given changes. */ -}}
{{- define "promptq.redisChecksum" -}}
annotations:
  promptq/redis: {{ toYaml .Values.redis.external | sha256sum }}
{{- end -}}

{{- define "promptq.env" -}}
{{- range $name, $value := . }}
- name: {{ $name }}
  value: {{ ternary (printf "%d" (int64 $value)) (toString $value) (and (kindIs "float64" $value) (eq (floor $value) $value)) | quote }}
{{- end }}
{{- end -}}
