package manifests

import (
	"net/netip"
	"reflect"
	"sort"
	"strconv"
	"strings"
	"sync"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// Unsupported names the set fields that Dunlin does not implement: one
// warning each where ignoring the field is safe, and an error where it is
// not. obj is defaulted; a default value never warns.
//
// It walks the object and looks every set field up in a table (see
// podFields, containerFields, ...): a field that the table does not know, of
// a newer API version for instance, warns. So nothing is ignored in silence.
func Unsupported(obj runtime.Object) (warnings []string, refused field.ErrorList) {
	w := &walker{}
	w.annotations(obj)
	switch o := obj.(type) {
	case *corev1.Pod:
		w.podSpec(specPath, &o.Spec)
	case *corev1.PodTemplate:
		w.podSpec(field.NewPath("template", "spec"), &o.Template.Spec)
	case *appsv1.ReplicaSet:
		w.podSpec(specPath.Child("template", "spec"), &o.Spec.Template.Spec)
	case *appsv1.Deployment:
		w.podSpec(specPath.Child("template", "spec"), &o.Spec.Template.Spec)
	case *appsv1.DaemonSet:
		w.podSpec(specPath.Child("template", "spec"), &o.Spec.Template.Spec)
	case *appsv1.StatefulSet:
		w.walk(specPath, reflect.ValueOf(o.Spec), "", statefulSetFields())
		w.podSpec(specPath.Child("template", "spec"), &o.Spec.Template.Spec)
	case *batchv1.Job:
		w.job(specPath, &o.Spec)
	case *batchv1.CronJob:
		w.job(specPath.Child("jobTemplate", "spec"), &o.Spec.JobTemplate.Spec)
	case *corev1.ReplicationController:
		if o.Spec.Template != nil {
			w.podSpec(specPath.Child("template", "spec"), &o.Spec.Template.Spec)
		}
	case *corev1.Service:
		w.walk(specPath, reflect.ValueOf(o.Spec), "", serviceFields())
	case *networkingv1.Ingress:
		w.walk(specPath, reflect.ValueOf(o.Spec), "", ingressFields())
	case *corev1.ServiceAccount:
		w.walk(nil, reflect.ValueOf(*o), "", serviceAccountFields())
	case *coordinationv1.Lease:
		w.walk(specPath, reflect.ValueOf(o.Spec), "", leaseFields())
	case *corev1.Node:
		w.walk(specPath, reflect.ValueOf(o.Spec), "", nodeFields())
	case *corev1.PersistentVolume:
		w.walk(specPath, reflect.ValueOf(o.Spec), "", persistentVolumeFields())
	case *corev1.PersistentVolumeClaim:
		w.walk(specPath, reflect.ValueOf(o.Spec), "", claimFields())
	}
	return w.warnings, w.refused
}

// verdict says what happens to a set field.
type verdict struct {
	// refuse: ignoring the field would be unsafe.
	refuse bool
	// why completes "<path>: ...". Empty: the field is implemented, with all
	// that is below it.
	why string
	// unless, if not nil, is asked with the field's value: true means that
	// this value is implemented after all.
	unless func(v reflect.Value, w *walker) bool
	// descend: the verdict is in the fields below.
	descend bool
}

// fieldTable maps field names, joined by dots and without indices, to verdicts.
type fieldTable = map[string]verdict

var implemented = verdict{}

func below(t fieldTable, prefix string, names ...string) {
	for _, n := range names {
		t[prefix+n] = implemented
	}
}

type walker struct {
	warnings []string
	refused  field.ErrorList
	wasm     bool // the pod is of the Wasm runtime
	init     bool // inside an init container
	inMemory bool // inside an emptyDir of medium Memory
}

func (w *walker) warn(at *field.Path, why string) {
	w.warnings = append(w.warnings, at.String()+": "+why)
}

// podSpec walks a pod's spec, and each container with its own table.
func (w *walker) podSpec(at *field.Path, s *corev1.PodSpec) {
	w.wasm = IsWasmPod(s)
	w.walk(at, reflect.ValueOf(*s), "", podFields())
	for i := range s.InitContainers {
		w.init = true
		w.walk(at.Child("initContainers").Index(i), reflect.ValueOf(s.InitContainers[i]), "", containerFields())
	}
	w.init = false
	for i := range s.Containers {
		w.walk(at.Child("containers").Index(i), reflect.ValueOf(s.Containers[i]), "", containerFields())
	}
}

// walk judges the set fields of a struct. key is its place in the table.
func (w *walker) walk(at *field.Path, v reflect.Value, key string, t fieldTable) {
	if e, ok := v.Interface().(corev1.EmptyDirVolumeSource); ok {
		w.inMemory = e.Medium == corev1.StorageMediumMemory
	}
	for i := 0; i < v.NumField(); i++ {
		f := v.Type().Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if name == "" && f.Anonymous {
			w.walk(at, v.Field(i), key, t)
			continue
		}
		if name == "" || name == "-" || !isSet(v.Field(i)) {
			continue
		}
		sub, in := name, at.Child(name)
		if key != "" {
			sub = key + "." + name
		}
		d, known := t[sub]
		if known && d.descend {
			w.into(in, v.Field(i), sub, t)
			continue
		}
		if !known {
			d = verdict{why: "not implemented, ignored"}
		}
		w.judge(in, v.Field(i), d)
	}
}

func (w *walker) judge(at *field.Path, v reflect.Value, d verdict) {
	if d.why == "" || d.unless != nil && d.unless(reflect.Indirect(v), w) {
		return
	}
	if !d.refuse {
		w.warn(at, d.why)
		return
	}
	w.refused = append(w.refused, field.Forbidden(at, d.why))
}

// into walks what a field holds: a struct, or each struct of a list.
func (w *walker) into(at *field.Path, v reflect.Value, key string, t fieldTable) {
	v = reflect.Indirect(v)
	switch v.Kind() {
	case reflect.Struct:
		w.walk(at, v, key, t)
	case reflect.Slice:
		for i := 0; i < v.Len(); i++ {
			w.into(at.Index(i), v.Index(i), key, t)
		}
	case reflect.Map:
		keys := v.MapKeys()
		sort.Slice(keys, func(i, j int) bool { return keys[i].String() < keys[j].String() })
		for _, k := range keys {
			d, known := t[key+"."+k.String()]
			if !known {
				d = t[key+".*"]
			}
			w.judge(at.Key(k.String()), v.MapIndex(k), d)
		}
	}
}

func isSet(v reflect.Value) bool {
	switch v.Kind() {
	case reflect.Slice, reflect.Map:
		return v.Len() > 0
	}
	return !v.IsZero()
}

// is allows the listed values of a string or boolean field.
func is(values ...string) func(reflect.Value, *walker) bool {
	return func(v reflect.Value, _ *walker) bool {
		s := ""
		if v.Kind() == reflect.Bool {
			s = strconv.FormatBool(v.Bool())
		} else {
			s = v.String()
		}
		return contains(values, s)
	}
}

// anyOf allows what one of the rules allows.
func anyOf(rules ...func(reflect.Value, *walker) bool) func(reflect.Value, *walker) bool {
	return func(v reflect.Value, w *walker) bool {
		for _, r := range rules {
			if r(v, w) {
				return true
			}
		}
		return false
	}
}

// onlyWasm applies the verdict to pods of the Wasm runtime only.
func onlyWasm(_ reflect.Value, w *walker) bool { return !w.wasm }

var podFields = sync.OnceValue(func() fieldTable {
	t := fieldTable{
		"containers": implemented, "initContainers": implemented, // walked apart
		"ephemeralContainers":          {refuse: true, why: "ephemeral containers are not implemented: kubectl exec runs what a container has, kubectl debug --copy-to a copy of the pod with another image"},
		"automountServiceAccountToken": implemented,
		"hostPID":                      {refuse: true, why: "the host's processes are never shown to a pod"},
		"hostIPC":                      {refuse: true, why: "the host's IPC is never shared with a pod"},
		"hostUsers":                    {refuse: true, why: "user namespaces are not implemented", unless: is("true")},
		"shareProcessNamespace":        {refuse: true, why: "containers of a pod do not share processes", unless: is("false")},
		"os":                           {descend: true},
		"os.name":                      {refuse: true, why: "only linux is supported", unless: is("linux")},
		"dnsPolicy":                    {why: "a Wasm guest resolves no names", unless: anyOf(onlyWasm, is("ClusterFirst", "Default"))},
		"dnsConfig":                    {why: "a Wasm guest resolves no names", unless: onlyWasm},
		"imagePullSecrets":             implemented,
		"hostAliases":                  {why: "a Wasm guest has no hosts file", unless: onlyWasm},
		"setHostnameAsFQDN":            {why: "not implemented, the hostname stays short", unless: is("false")},
		"hostnameOverride":             {why: "not implemented, the hostname is that of spec.hostname or the pod's name"},
		"resourceClaims":               {refuse: true, why: "dynamic resource allocation is not implemented"},
		"resources":                    {why: "requests count when the pod is placed, but pod-level limits are not enforced"},
		"schedulingGroup":              {why: "not implemented, the pod is placed on its own"},

		"securityContext":                     {descend: true},
		"securityContext.fsGroupChangePolicy": {why: "not implemented, ownership is always set", unless: is("Always")},
		"securityContext.sysctls":             {refuse: true, why: "a Wasm guest has no kernel parameters of its own", unless: onlyWasm},
		"securityContext.seLinuxChangePolicy": {why: "not implemented, ignored"},
		"volumes":                             {descend: true},
	}
	below(t, "", "restartPolicy", "terminationGracePeriodSeconds", "activeDeadlineSeconds", "nodeSelector", "serviceAccountName",
		"serviceAccount", "nodeName", "hostNetwork", "hostname", "subdomain", "schedulerName", "tolerations", "priorityClassName",
		"priority", "runtimeClassName", "enableServiceLinks", "preemptionPolicy", "overhead", "schedulingGates", "readinessGates",
		"affinity", "topologySpreadConstraints")
	below(t, "securityContext.", "runAsUser", "runAsGroup", "runAsNonRoot", "fsGroup", "supplementalGroups", "supplementalGroupsPolicy")
	profiles(t)
	volumeFieldsOf(t)
	return t
})

// profiles are the security profiles, in a pod's and in a container's
// security context.
func profiles(t fieldTable) {
	const sc = "securityContext."
	t[sc+"seLinuxOptions"] = verdict{why: "SELinux labels are not implemented: without effect on a node without SELinux, refused by a node with it"}
	t[sc+"windowsOptions"] = verdict{refuse: true, why: "only linux is supported"}
	t[sc+"seccompProfile"] = verdict{descend: true}
	t[sc+"seccompProfile.type"] = verdict{refuse: true, why: "a Wasm guest always has the built-in seccomp filter (RuntimeDefault)", unless: anyOf(onlyWasm, is("RuntimeDefault"))}
	t[sc+"seccompProfile.localhostProfile"] = verdict{refuse: true, why: "a Wasm guest always has the built-in seccomp filter (RuntimeDefault)", unless: onlyWasm}
	t[sc+"appArmorProfile"] = verdict{refuse: true, why: "AppArmor profiles are not implemented", unless: func(v reflect.Value, _ *walker) bool {
		return corev1.AppArmorProfileType(v.FieldByName("Type").String()) == corev1.AppArmorProfileTypeUnconfined
	}}
}

func volumeFieldsOf(t fieldTable) {
	const none = "this type of volume is not implemented"
	for _, v := range reflect.VisibleFields(reflect.TypeFor[corev1.VolumeSource]()) {
		name, _, _ := strings.Cut(v.Tag.Get("json"), ",")
		t["volumes."+name] = verdict{refuse: true, why: none + "; implemented are emptyDir, configMap, secret, downwardAPI, projected, persistentVolumeClaim, ephemeral, hostPath and image"}
	}
	below(t, "volumes.", "name", "hostPath", "persistentVolumeClaim", "image")
	claimTemplate(t, "volumes.ephemeral")
	for name, fields := range map[string][]string{
		"emptyDir": {"medium"}, "configMap": {"name", "items", "defaultMode", "optional"},
		"secret": {"secretName", "items", "defaultMode", "optional"}, "downwardAPI": {"items", "defaultMode"},
		"projected": {"defaultMode"},
	} {
		t["volumes."+name] = verdict{descend: true}
		below(t, "volumes."+name+".", fields...)
	}
	t["volumes.emptyDir.sizeLimit"] = verdict{why: "limits a folder in memory (medium: Memory) only; the size on disk is not limited",
		unless: func(_ reflect.Value, w *walker) bool { return w.inMemory }}
	t["volumes.projected.sources"] = verdict{descend: true}
	below(t, "volumes.projected.sources.", "secret", "configMap", "downwardAPI")
	t["volumes.projected.sources.serviceAccountToken"] = implemented
	t["volumes.projected.sources.clusterTrustBundle"] = verdict{refuse: true, why: "cluster trust bundles are not implemented"}
	t["volumes.projected.sources.podCertificate"] = verdict{refuse: true, why: "pod certificates are not implemented"}
}

// restartOfInit allows restartPolicy Always of an init container.
func restartOfInit(v reflect.Value, w *walker) bool {
	return w.init && corev1.ContainerRestartPolicy(v.String()) == corev1.ContainerRestartPolicyAlways
}

// servedHostIP allows what host ports can be bound to.
func servedHostIP(v reflect.Value, w *walker) bool {
	ip, err := netip.ParseAddr(v.String())
	return v.String() == "" || err == nil && (ip == netip.IPv4Unspecified() || ip.Is4() && !w.wasm)
}

var containerFields = sync.OnceValue(func() fieldTable {
	const noSignals = "has no effect: a Wasm guest has no signals, its listeners close and its stdin ends instead"
	t := fieldTable{
		"ports": {descend: true},
		"ports.protocol": {refuse: true, why: "a Wasm guest is handed TCP listeners only", unless: func(v reflect.Value, w *walker) bool {
			return !w.wasm || v.String() == string(corev1.ProtocolTCP)
		}},
		"ports.hostIP":       {refuse: true, why: "a host port leads to containers from IPv4 addresses, and is opened on every address of the node for a Wasm guest", unless: servedHostIP},
		"env":                {descend: true},
		"env.valueFrom":      {descend: true},
		"resources":          {descend: true},
		"resources.limits":   {descend: true},
		"resources.limits.*": implemented,
		"resources.limits.ephemeral-storage": {
			why: "not implemented, the space that a container uses is not limited"},
		"resources.claims": {refuse: true, why: "dynamic resource allocation is not implemented"},
		"resizePolicy":     {why: "not implemented, resources are fixed when the container starts"},
		"restartPolicy":    {why: "not implemented, the pod's restartPolicy applies", unless: restartOfInit},
		"restartPolicyRules": {
			why: "not implemented, the pod's restartPolicy applies"},
		"volumeDevices": {refuse: true, why: "block devices are not implemented"},
		"volumeMounts":  {descend: true},
		"volumeMounts.mountPropagation": {
			refuse: true, why: "a Wasm guest makes no mounts", unless: anyOf(onlyWasm, is("None", "HostToContainer"))},
		"volumeMounts.recursiveReadOnly": {
			refuse: true, why: "not implemented: mounts below would stay writable", unless: anyOf(onlyWasm, is("Disabled", "IfPossible"))},
		"lifecycle":           {descend: true},
		"lifecycle.postStart": {descend: true},
		"lifecycle.postStart.exec": {
			refuse: true, why: "a Wasm guest has no exec; use httpGet or sleep", unless: onlyWasm},
		"lifecycle.postStart.tcpSocket": {why: "has no effect"},
		"lifecycle.preStop":             {descend: true},
		"lifecycle.preStop.exec": {
			refuse: true, why: "a Wasm guest has no exec; use httpGet or sleep", unless: onlyWasm},
		"lifecycle.preStop.tcpSocket": {why: "has no effect"},
		"lifecycle.stopSignal":        {why: noSignals, unless: onlyWasm},
		"terminationMessagePath": {why: "not implemented, the message is taken from the last lines of output",
			unless: anyOf(onlyWasm, is(corev1.TerminationMessagePathDefault))},
		"stdinOnce": {why: "a Wasm guest's stdin stays open", unless: anyOf(onlyWasm, is("false"))},
		"tty":       {why: "a Wasm guest has no terminal", unless: onlyWasm},

		"securityContext":            {descend: true},
		"securityContext.privileged": {refuse: true, why: "a Wasm guest cannot be privileged", unless: falseOrOCI},
		"securityContext.procMount":  {refuse: true, why: "a Wasm guest has no /proc", unless: anyOf(onlyWasm, is("Default"))},
		"securityContext.capabilities": {
			descend: true},
		"securityContext.capabilities.add": {refuse: true, why: "a Wasm guest has no capabilities", unless: onlyWasm},
	}
	below(t, "", "name", "image", "command", "args", "workingDir", "envFrom", "terminationMessagePolicy", "imagePullPolicy", "stdin")
	below(t, "ports.", "name", "containerPort", "hostPort")
	below(t, "env.", "name", "value")
	below(t, "env.valueFrom.", "fieldRef", "resourceFieldRef", "configMapKeyRef", "secretKeyRef")
	t["env.valueFrom.fileKeyRef"] = verdict{refuse: true, why: "not implemented: the variable would be missing"}
	below(t, "resources.", "requests")
	below(t, "volumeMounts.", "name", "readOnly", "mountPath", "subPath", "subPathExpr")
	below(t, "lifecycle.preStop.", "httpGet", "sleep")
	below(t, "lifecycle.postStart.", "httpGet", "sleep")
	below(t, "securityContext.", "runAsUser", "runAsGroup", "runAsNonRoot", "readOnlyRootFilesystem", "allowPrivilegeEscalation")
	below(t, "securityContext.capabilities.", "drop")
	profiles(t)
	for _, p := range []string{"livenessProbe", "readinessProbe", "startupProbe"} {
		t[p] = verdict{descend: true}
		t[p+".exec"] = verdict{refuse: true, why: "a Wasm guest has no exec; use httpGet or tcpSocket", unless: onlyWasm}
		below(t, p+".", "httpGet", "tcpSocket", "grpc", "initialDelaySeconds", "timeoutSeconds", "periodSeconds", "successThreshold",
			"failureThreshold", "terminationGracePeriodSeconds")
	}
	return t
})

func falseOrOCI(v reflect.Value, w *walker) bool { return !v.Bool() || !w.wasm }

var serviceFields = sync.OnceValue(func() fieldTable {
	t := fieldTable{
		"loadBalancerClass": {why: "not implemented, no other load balancer is asked"},
		"loadBalancerIP":    {why: "not implemented, nodes' own addresses are used"},
	}
	// Their own rule is that of the type or affinity they belong to.
	below(t, "", "type", "externalName", "externalIPs", "sessionAffinity", "externalTrafficPolicy", "internalTrafficPolicy",
		"trafficDistribution", "selector", "clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy", "publishNotReadyAddresses",
		"sessionAffinityConfig", "allocateLoadBalancerNodePorts", "healthCheckNodePort", "loadBalancerSourceRanges")
	t["ports"] = verdict{descend: true}
	below(t, "ports.", "name", "appProtocol", "port", "targetPort", "nodePort")
	t["ports.protocol"] = verdict{why: "SCTP is not implemented, nothing will listen there", unless: func(v reflect.Value, _ *walker) bool {
		return v.String() != string(corev1.ProtocolSCTP)
	}}
	return t
})

var serviceAccountFields = sync.OnceValue(func() fieldTable {
	return fieldTable{
		"kind": implemented, "apiVersion": implemented, "metadata": implemented,
		"secrets":                      {why: "not implemented, ignored"},
		"imagePullSecrets":             implemented,
		"automountServiceAccountToken": implemented,
	}
})

var leaseFields = sync.OnceValue(func() fieldTable {
	const why = "coordinated leader election is not implemented"
	t := fieldTable{"strategy": {why: why}, "preferredHolder": {why: why}}
	below(t, "", "holderIdentity", "leaseDurationSeconds", "acquireTime", "renewTime", "leaseTransitions")
	return t
})

var nodeFields = sync.OnceValue(func() fieldTable {
	t := fieldTable{}
	below(t, "", "podCIDR", "podCIDRs", "providerID", "unschedulable", "taints")
	return t
})

func (w *walker) job(at *field.Path, s *batchv1.JobSpec) {
	w.walk(at, reflect.ValueOf(*s), "", jobFields())
	w.podSpec(at.Child("template", "spec"), &s.Template.Spec)
}

var jobFields = sync.OnceValue(func() fieldTable {
	t := fieldTable{"scheduling": {why: "not implemented, each pod is placed on its own"}}
	below(t, "", "parallelism", "completions", "activeDeadlineSeconds", "podFailurePolicy", "successPolicy", "backoffLimit",
		"backoffLimitPerIndex", "maxFailedIndexes", "selector", "manualSelector", "template", "ttlSecondsAfterFinished",
		"completionMode", "suspend", "podReplacementPolicy", "managedBy")
	return t
})

var statefulSetFields = sync.OnceValue(func() fieldTable {
	t := fieldTable{
		"persistentVolumeClaimRetentionPolicy": {descend: true},
		"volumeClaimTemplates":                 {descend: true},
	}
	below(t, "persistentVolumeClaimRetentionPolicy.", "whenDeleted", "whenScaled")
	below(t, "volumeClaimTemplates.", "kind", "apiVersion", "metadata", "status")
	t["volumeClaimTemplates.spec"] = verdict{descend: true}
	for name, v := range claimFields() {
		t["volumeClaimTemplates.spec."+name] = v
	}
	below(t, "", "replicas", "selector", "template", "serviceName", "podManagementPolicy", "updateStrategy", "revisionHistoryLimit",
		"minReadySeconds", "ordinals")
	return t
})

// ingressFields: an Ingress of a class that others serve may use what it
// likes, but here nothing but Services answers.
var ingressFields = sync.OnceValue(func() fieldTable {
	const why = "only Services are backends here: requests are answered with 503"
	t := fieldTable{
		"defaultBackend": {descend: true}, "rules": {descend: true}, "rules.http": {descend: true},
		"rules.http.paths": {descend: true}, "rules.http.paths.backend": {descend: true},
		"defaultBackend.resource": {why: why}, "rules.http.paths.backend.resource": {why: why},
	}
	below(t, "", "ingressClassName", "tls", "defaultBackend.service", "rules.host", "rules.http.paths.path", "rules.http.paths.pathType", "rules.http.paths.backend.service")
	return t
})
