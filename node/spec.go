package node

import (
	"fmt"
	"path/filepath"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/manifests"
	"github.com/dunlin-project/dunlin/node/volumes"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// logPath is where one attempt of a container logs.
func (a *Agent) logPath(namespace, name, uid, container string, attempt int) string {
	return filepath.Join(a.podLogs(namespace, name, uid), container, strconv.Itoa(attempt)+".log")
}

func (a *Agent) podLogs(namespace, name, uid string) string {
	return filepath.Join(a.logs(), namespace+"_"+name+"_"+uid)
}

func (a *Agent) logs() string { return filepath.Join(a.c.StateDir, "logs") }

// containerSpec describes one attempt to the runtime, but for its listeners.
func (a *Agent) containerSpec(s *podState, c *ctrState, id workload.ID, paths map[string]string) (workload.Spec, error) {
	pod := s.pod
	if err := seLinux(pod, c.spec, seLinuxOn()); err != nil {
		return workload.Spec{}, configError(err)
	}
	f := a.fieldFacts(s)
	env, err := resolveEnv(pod, c.spec, a.serviceEnv(pod), a, f)
	if err != nil {
		return workload.Spec{}, err
	}
	mounts, err := resolveMounts(c.spec, paths, readOnlyVolumes(pod), env)
	if err != nil {
		return workload.Spec{}, configError(err)
	}
	spec := workload.Spec{
		ID: id, PodNamespace: pod.Namespace, PodName: pod.Name, NodeName: a.c.NodeName,
		Image: c.spec.Image, Digest: c.digest,
		Command: expandAll(env, c.spec.Command), Args: expandAll(env, c.spec.Args),
		Env: env.list(), WorkingDir: c.spec.WorkingDir, Mounts: mounts,
		Resources: resources(pod, c.spec, f.Allocatable),
		Identity:  a.identityFor(s, c.spec),
		Security:  security(pod, c.spec, a.seccompDir()),
		Stdin:     c.spec.Stdin, StdinOnce: c.spec.StdinOnce, TTY: c.spec.TTY, Hostname: hostname(pod),
		CgroupParent: "pods/" + qosFolder(manifests.QOSClass(pod)) + "/" + string(pod.UID),
		LogPath:      a.logPath(pod.Namespace, pod.Name, string(pod.UID), c.rec.Name, id.Attempt),
		LogMaxBytes:  a.c.LogMaxBytes, LogMaxFiles: a.c.LogMaxFiles,
		Annotations: pod.Annotations,
	}
	spec.Resources.PidsLimit = a.c.PidsLimit
	if s.rec.Allocation != nil {
		spec.Namespace = s.rec.Allocation.Namespace
	}
	if allow := pod.Annotations[manifests.AnnotationOutbound]; allow != "" && a.handler(pod) == wasmHandler {
		if spec.Outbound, err = a.outbound(pod, allow); err != nil {
			return workload.Spec{}, configError(err)
		}
	}
	if a.handler(pod) == ociHandler {
		if err := a.forContainer(s, c, &spec); err != nil {
			return workload.Spec{}, err
		}
	}
	if sc := c.spec.SecurityContext; sc != nil && sc.ReadOnlyRootFilesystem != nil {
		spec.ReadOnlyRoot = *sc.ReadOnlyRootFilesystem
	}
	if spec.StopDeadline, err = manifests.StopDeadline(pod); err != nil {
		return workload.Spec{}, configError(fmt.Errorf("annotation %s: %w", manifests.AnnotationStopDeadline, err))
	}
	spec.StopGrace = s.grace()
	return spec, nil
}

func expandAll(e *environment, in []string) []string {
	out := make([]string, len(in))
	for i, s := range in {
		out[i] = e.expand(s)
	}
	return out
}

func hostname(pod *corev1.Pod) string {
	h := pod.Spec.Hostname
	if h == "" {
		h = pod.Name
	}
	const maxLen = 63
	if len(h) > maxLen {
		h = strings.TrimRight(h[:maxLen], "-.")
	}
	return h
}

// readOnlyVolumes are those that the pod itself mounts read-only, and those
// whose files are the cluster's, whatever their mounts say (as the kubelet's
// since CVE-2017-1002102): what a container wrote there would be gone with the
// next change, and be believed until then.
func readOnlyVolumes(pod *corev1.Pod) map[string]bool {
	out := map[string]bool{}
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		out[v.Name] = v.ConfigMap != nil || v.Secret != nil || v.Projected != nil || v.DownwardAPI != nil
	}
	for _, u := range manifests.ClaimsOf(pod) {
		out[u.Volume] = u.ReadOnly
	}
	return out
}

func resolveMounts(c *corev1.Container, paths map[string]string, readOnly map[string]bool, env *environment) ([]workload.Mount, error) {
	mounts := make([]workload.Mount, 0, len(c.VolumeMounts))
	for i := range c.VolumeMounts {
		m := &c.VolumeMounts[i]
		p, ok := paths[m.Name]
		if !ok {
			return nil, fmt.Errorf("volume %q of mount %s does not exist", m.Name, m.MountPath)
		}
		sub := m.SubPath
		if m.SubPathExpr != "" {
			if sub = env.expand(m.SubPathExpr); strings.Contains(sub, "$(") {
				return nil, fmt.Errorf("subPathExpr %q names an unknown variable", m.SubPathExpr)
			}
		}
		if sub != "" {
			var err error
			if p, err = volumes.SubPath(p, sub); err != nil {
				return nil, err
			}
		}
		out := workload.Mount{Source: p, Target: m.MountPath, ReadOnly: m.ReadOnly || readOnly[m.Name]}
		if m.RecursiveReadOnly != nil {
			out.Recursive = *m.RecursiveReadOnly != corev1.RecursiveReadOnlyDisabled
		}
		if m.MountPropagation != nil {
			out.Propagation = map[corev1.MountPropagationMode]string{
				corev1.MountPropagationHostToContainer: "rslave", corev1.MountPropagationBidirectional: "rshared",
			}[*m.MountPropagation]
		}
		mounts = append(mounts, out)
	}
	return mounts, nil
}

func resources(pod *corev1.Pod, c *corev1.Container, allocatable corev1.ResourceList) workload.Resources {
	r := workload.Resources{
		CPURequestMilli: c.Resources.Requests.Cpu().MilliValue(),
		CPULimitMilli:   c.Resources.Limits.Cpu().MilliValue(),
		MemoryRequest:   c.Resources.Requests.Memory().Value(),
		MemoryLimit:     c.Resources.Limits.Memory().Value(),
	}
	qos := manifests.QOSClass(pod)
	switch { // upstream's figures
	case qos == corev1.PodQOSGuaranteed, critical(pod) == 1:
		r.OOMScoreAdj = -997
	case qos == corev1.PodQOSBestEffort:
		r.OOMScoreAdj = 1000
	default:
		r.OOMScoreAdj = 999
		if total := allocatable.Memory().Value(); total > 0 {
			r.OOMScoreAdj = int(min(max(1000-1000*r.MemoryRequest/total, 3), 999))
		}
	}
	return r
}

func identity(pod *corev1.Pod, c *corev1.Container) (id workload.Identity) {
	if sc := pod.Spec.SecurityContext; sc != nil {
		id.UID, id.GID = sc.RunAsUser, sc.RunAsGroup
		id.Groups = append(id.Groups, sc.SupplementalGroups...)
		if sc.FSGroup != nil {
			id.Groups = append(id.Groups, *sc.FSGroup)
		}
	}
	if sc := c.SecurityContext; sc != nil {
		if sc.RunAsUser != nil {
			id.UID = sc.RunAsUser
		}
		if sc.RunAsGroup != nil {
			id.GID = sc.RunAsGroup
		}
	}
	return id
}

// serviceEnv is what upstream gives every pod; see Config.ServiceEnv.
func (a *Agent) serviceEnv(pod *corev1.Pod) [][2]string {
	return a.c.ServiceEnv(pod.Namespace, pod.Spec.EnableServiceLinks == nil || *pod.Spec.EnableServiceLinks)
}
