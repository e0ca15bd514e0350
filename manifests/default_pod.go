package manifests

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// defaultPod has the defaults that a Pod gets and a template does not.
func defaultPod(p *corev1.Pod) {
	s := &p.Spec
	if g := s.TerminationGracePeriodSeconds; g != nil && *g < 0 {
		one := int64(1)
		s.TerminationGracePeriodSeconds = &one
	}
	for _, cs := range [][]corev1.Container{s.Containers, s.InitContainers} {
		for i := range cs {
			r := &cs[i].Resources
			if r.Limits != nil {
				if r.Requests == nil {
					r.Requests = corev1.ResourceList{}
				}
				fillResources(r.Requests, r.Limits)
			}
			if s.HostNetwork {
				for j := range cs[i].Ports {
					setZero(&cs[i].Ports[j].HostPort, cs[i].Ports[j].ContainerPort)
				}
			}
		}
	}
	setDefault(&s.EnableServiceLinks, corev1.DefaultEnableServiceLinks)
	defaultPodSpec(s)
	defaultPodStatus(&p.Status)
}

func defaultPodSpec(s *corev1.PodSpec) {
	setZero(&s.ServiceAccountName, s.DeprecatedServiceAccount)
	s.DeprecatedServiceAccount = s.ServiceAccountName
	setZero(&s.DNSPolicy, corev1.DNSClusterFirst)
	setZero(&s.RestartPolicy, corev1.RestartPolicyAlways)
	setDefault(&s.SecurityContext, corev1.PodSecurityContext{})
	setDefault(&s.TerminationGracePeriodSeconds, int64(corev1.DefaultTerminationGracePeriodSeconds))
	setZero(&s.SchedulerName, corev1.DefaultSchedulerName)
	for i := range s.Volumes {
		defaultVolume(&s.Volumes[i])
	}
	for i := range s.InitContainers {
		defaultContainer(&s.InitContainers[i])
	}
	for i := range s.Containers {
		defaultContainer(&s.Containers[i])
	}
	for i := range s.EphemeralContainers {
		defaultContainer((*corev1.Container)(&s.EphemeralContainers[i].EphemeralContainerCommon))
	}
	roundResources(s.Overhead)
	if s.Resources != nil {
		roundResources(s.Resources.Limits, s.Resources.Requests)
	}
}

func defaultPodStatus(st *corev1.PodStatus) {
	switch {
	case st.PodIP != "" && (len(st.PodIPs) == 0 || st.PodIPs[0].IP != st.PodIP):
		st.PodIPs = []corev1.PodIP{{IP: st.PodIP}}
	case st.PodIP == "" && len(st.PodIPs) > 0:
		st.PodIP = st.PodIPs[0].IP
	}
	for _, cs := range [][]corev1.ContainerStatus{st.InitContainerStatuses, st.ContainerStatuses, st.EphemeralContainerStatuses} {
		for i := range cs {
			roundResources(cs[i].AllocatedResources)
			if cs[i].Resources != nil {
				roundResources(cs[i].Resources.Limits, cs[i].Resources.Requests)
			}
		}
	}
	roundResources(st.AllocatedResources)
	if st.Resources != nil {
		roundResources(st.Resources.Limits, st.Resources.Requests)
	}
}

func defaultContainer(c *corev1.Container) {
	setZero(&c.ImagePullPolicy, pullPolicy(c.Image))
	setZero(&c.TerminationMessagePath, corev1.TerminationMessagePathDefault)
	setZero(&c.TerminationMessagePolicy, corev1.TerminationMessageReadFile)
	for i := range c.Ports {
		setZero(&c.Ports[i].Protocol, corev1.ProtocolTCP)
	}
	for i := range c.Env {
		v := c.Env[i].ValueFrom
		if v == nil {
			continue
		}
		defaultFieldRef(v.FieldRef)
		if v.FileKeyRef != nil {
			setDefault(&v.FileKeyRef.Optional, false)
		}
	}
	roundResources(c.Resources.Limits, c.Resources.Requests)
	for _, p := range []*corev1.Probe{c.LivenessProbe, c.ReadinessProbe, c.StartupProbe} {
		defaultProbe(p)
	}
	if c.Lifecycle != nil {
		for _, h := range []*corev1.LifecycleHandler{c.Lifecycle.PostStart, c.Lifecycle.PreStop} {
			if h != nil {
				defaultHTTPGet(h.HTTPGet)
			}
		}
	}
}

func defaultProbe(p *corev1.Probe) {
	if p == nil {
		return
	}
	setZero(&p.TimeoutSeconds, 1)
	setZero(&p.PeriodSeconds, 10)
	setZero(&p.SuccessThreshold, 1)
	setZero(&p.FailureThreshold, 3)
	defaultHTTPGet(p.HTTPGet)
	if p.GRPC != nil {
		setDefault(&p.GRPC.Service, "")
	}
}

func defaultHTTPGet(h *corev1.HTTPGetAction) {
	if h != nil {
		setZero(&h.Path, "/")
		setZero(&h.Scheme, corev1.URISchemeHTTP)
	}
}

func defaultFieldRef(f *corev1.ObjectFieldSelector) {
	if f != nil {
		setZero(&f.APIVersion, "v1")
	}
}

func defaultVolume(v *corev1.Volume) {
	s := &v.VolumeSource
	if *s == (corev1.VolumeSource{}) {
		s.EmptyDir = &corev1.EmptyDirVolumeSource{}
	}
	if s.Image != nil {
		setZero(&s.Image.PullPolicy, pullPolicy(s.Image.Reference))
	}
	if s.HostPath != nil {
		setDefault(&s.HostPath.Type, corev1.HostPathUnset)
	}
	if s.Secret != nil {
		setDefault(&s.Secret.DefaultMode, corev1.SecretVolumeSourceDefaultMode)
	}
	if s.ConfigMap != nil {
		setDefault(&s.ConfigMap.DefaultMode, corev1.ConfigMapVolumeSourceDefaultMode)
	}
	if s.DownwardAPI != nil {
		setDefault(&s.DownwardAPI.DefaultMode, corev1.DownwardAPIVolumeSourceDefaultMode)
		for i := range s.DownwardAPI.Items {
			defaultFieldRef(s.DownwardAPI.Items[i].FieldRef)
		}
	}
	if s.Projected != nil {
		defaultProjected(s.Projected)
	}
	if s.Ephemeral != nil && s.Ephemeral.VolumeClaimTemplate != nil {
		defaultClaim(&s.Ephemeral.VolumeClaimTemplate.Spec)
	}
	defaultForeignVolume(s)
}

func defaultProjected(p *corev1.ProjectedVolumeSource) {
	setDefault(&p.DefaultMode, corev1.ProjectedVolumeSourceDefaultMode)
	for i := range p.Sources {
		src := &p.Sources[i]
		if src.DownwardAPI != nil {
			for j := range src.DownwardAPI.Items {
				defaultFieldRef(src.DownwardAPI.Items[j].FieldRef)
			}
		}
		if src.ServiceAccountToken != nil {
			setDefault(&src.ServiceAccountToken.ExpirationSeconds, 3600)
		}
	}
}

// defaultForeignVolume has the defaults of volume types that no node of ours
// mounts; templates with them are stored, and other readers expect them.
func defaultForeignVolume(s *corev1.VolumeSource) {
	if s.ISCSI != nil {
		setZero(&s.ISCSI.ISCSIInterface, "default")
	}
	if s.RBD != nil {
		setZero(&s.RBD.RBDPool, "rbd")
		setZero(&s.RBD.RadosUser, "admin")
		setZero(&s.RBD.Keyring, "/etc/ceph/keyring")
	}
	if s.AzureDisk != nil {
		defaultAzureDisk(s.AzureDisk)
	}
	if s.ScaleIO != nil {
		setZero(&s.ScaleIO.StorageMode, "ThinProvisioned")
		setZero(&s.ScaleIO.FSType, "xfs")
	}
}

func defaultAzureDisk(d *corev1.AzureDiskVolumeSource) {
	setDefault(&d.CachingMode, corev1.AzureDataDiskCachingReadWrite)
	setDefault(&d.FSType, "ext4")
	setDefault(&d.ReadOnly, false)
	setDefault(&d.Kind, corev1.AzureSharedBlobDisk)
}

// pullPolicy is Always for the tag "latest", named or implied, and
// IfNotPresent for everything else, also for what is no valid reference
// (file:// paths among them).
func pullPolicy(image string) corev1.PullPolicy {
	if tag, ok := imageTag(image); ok && tag == "latest" {
		return corev1.PullAlways
	}
	return corev1.PullIfNotPresent
}

// imageTag gives an image reference's tag: "latest" if it has neither tag nor
// digest, "" if it only has a digest. ok is false if the reference does not
// follow the grammar of github.com/distribution/reference.
func imageTag(image string) (tag string, ok bool) {
	rest, digest, digested := strings.Cut(image, "@")
	if digested && !validDigest(digest) {
		return "", false
	}
	name := rest
	if colon := strings.LastIndexByte(rest, ':'); colon > strings.LastIndexByte(rest, '/') {
		name, tag = rest[:colon], rest[colon+1:]
		if !validTag(tag) {
			return "", false
		}
	}
	if !validRepository(name, image == name) {
		return "", false
	}
	if tag == "" && !digested {
		tag = "latest"
	}
	return tag, true
}

func validTag(tag string) bool {
	if tag == "" || len(tag) > 128 || tag[0] == '.' || tag[0] == '-' {
		return false
	}
	for i := 0; i < len(tag); i++ {
		if c := tag[i]; !isAlnum(c) && c != '_' && c != '.' && c != '-' {
			return false
		}
	}
	return true
}

func validDigest(d string) bool {
	algorithm, hex, _ := strings.Cut(d, ":")
	want := map[string]int{"sha256": 64, "sha384": 96, "sha512": 128}[algorithm]
	if want == 0 || len(hex) != want {
		return false
	}
	return isHex(hex)
}

func isHex(s string) bool {
	for i := 0; i < len(s); i++ {
		if c := s[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}

// validRepository checks [domain/]path. A bare 64-digit hex name is an image
// id, which is not a name.
func validRepository(name string, bare bool) bool {
	if name == "" || bare && len(name) == 64 && isHex(name) {
		return false
	}
	domain, path, ok := strings.Cut(name, "/")
	if !ok || !strings.ContainsAny(domain, ".:") && domain != "localhost" && strings.ToLower(domain) == domain {
		domain, path = "docker.io", name
		if !ok {
			path = "library/" + name
		}
	}
	// What is no domain may still be the first component of a path.
	return len(path) <= 255 && (validDomain(domain) && validPath(path) || validPath(domain+"/"+path))
}

func validPath(path string) bool {
	for _, c := range strings.Split(path, "/") {
		if !validPathComponent(c) {
			return false
		}
	}
	return true
}

func validDomain(d string) bool {
	host, port := d, ""
	if strings.HasPrefix(d, "[") {
		end := strings.IndexByte(d, ']')
		if end < 2 || strings.Trim(d[1:end], "0123456789abcdefABCDEF:") != "" {
			return false
		}
		if rest := d[end+1:]; rest != "" {
			return rest[0] == ':' && digits(rest[1:])
		}
		return true
	}
	if colon := strings.IndexByte(d, ':'); colon >= 0 {
		host, port = d[:colon], d[colon+1:]
		if !digits(port) {
			return false
		}
	}
	for _, c := range strings.Split(host, ".") {
		if c == "" || c[0] == '-' || c[len(c)-1] == '-' {
			return false
		}
		for i := 0; i < len(c); i++ {
			if !isAlnum(c[i]) && c[i] != '-' {
				return false
			}
		}
	}
	return true
}

func digits(s string) bool { return s != "" && strings.Trim(s, "0123456789") == "" }

// validPathComponent: lower-case alphanumerics, joined by ".", "_", "__" or
// any number of "-".
func validPathComponent(c string) bool {
	isWord := func(b byte) bool { return b >= 'a' && b <= 'z' || b >= '0' && b <= '9' }
	if c == "" || !isWord(c[0]) || !isWord(c[len(c)-1]) {
		return false
	}
	for i := 0; i < len(c); {
		if isWord(c[i]) {
			i++
			continue
		}
		j := i
		for j < len(c) && !isWord(c[j]) {
			j++
		}
		if sep := c[i:j]; sep != "." && sep != "_" && sep != "__" && strings.Trim(sep, "-") != "" {
			return false
		}
		i = j
	}
	return true
}

func isAlnum(c byte) bool {
	return c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
}
