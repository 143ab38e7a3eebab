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
{{- $own.repository | default $root.Values.image.repository }}:{{ $own.tag | default $root.Values.image.tag | default $root.Chart.AppVersion }}
{{- end -}}

{{- define "promptq.redisEnv" -}}
- name: PROMPTQ_REDIS_URL
  valueFrom:
    secretKeyRef:
{{- if .Values.redis.external.secret }}
      name: {{ .Values.redis.external.secret | quote }}
      key: {{ .Values.redis.external.secretKey | quote }}
{{- else }}
      name: {{ include "promptq.name" . }}-redis
      key: url
{{- end }}
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
