package manifests

import (
	"path"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// volumes checks a pod's volumes and gives those that may be mounted.
func (p *problems) volumes(at *field.Path, volumes []corev1.Volume) map[string]*corev1.VolumeSource {
	good := map[string]*corev1.VolumeSource{}
	for i := range volumes {
		v := &volumes[i]
		before := len(p.list)
		p.volumeSource(at.Index(i), &v.VolumeSource)
		name := at.Index(i).Child("name")
		if v.Name == "" {
			p.required(name, "")
		} else {
			p.dnsLabel(name, v.Name)
		}
		if good[v.Name] != nil {
			p.duplicate(name, v.Name)
		}
		if len(p.list) == before {
			good[v.Name] = &v.VolumeSource
		}
	}
	return good
}

func (p *problems) volumeSource(at *field.Path, s *corev1.VolumeSource) {
	sources := 0
	check := func(set bool, name string, f func(*field.Path)) {
		switch {
		case !set:
			return
		case sources > 0:
			p.forbidden(at.Child(name), "may not specify more than 1 volume type")
		case f != nil:
			f(at.Child(name))
		}
		sources++
	}
	check(s.EmptyDir != nil, "emptyDir", func(at *field.Path) { p.emptyDir(at, s.EmptyDir) })
	check(s.HostPath != nil, "hostPath", func(at *field.Path) { p.hostPath(at, s.HostPath) })
	check(s.Secret != nil, "secret", func(at *field.Path) {
		if s.Secret.SecretName == "" {
			p.required(at.Child("secretName"), "")
		}
		p.fileMode(at.Child("defaultMode"), s.Secret.DefaultMode)
		p.keysToPaths(at.Child("items"), s.Secret.Items)
	})
	check(s.ConfigMap != nil, "configMap", func(at *field.Path) {
		if s.ConfigMap.Name == "" {
			p.required(at.Child("name"), "")
		}
		p.fileMode(at.Child("defaultMode"), s.ConfigMap.DefaultMode)
		p.keysToPaths(at.Child("items"), s.ConfigMap.Items)
	})
	check(s.DownwardAPI != nil, "downwardAPI", func(at *field.Path) {
		p.fileMode(at.Child("defaultMode"), s.DownwardAPI.DefaultMode)
		for i := range s.DownwardAPI.Items {
			p.downwardFile(at, &s.DownwardAPI.Items[i])
		}
	})
	check(s.Projected != nil, "projected", func(at *field.Path) {
		p.fileMode(at.Child("defaultMode"), s.Projected.DefaultMode)
		p.projected(at, s.Projected)
	})
	check(s.PersistentVolumeClaim != nil, "persistentVolumeClaim", func(at *field.Path) {
		if s.PersistentVolumeClaim.ClaimName == "" {
			p.required(at.Child("claimName"), "")
		}
	})
	check(s.Ephemeral != nil, "ephemeral", func(at *field.Path) { p.ephemeral(at, s.Ephemeral) })
	check(s.NFS != nil, "nfs", func(at *field.Path) { p.nfs(at, s.NFS) })
	check(s.Image != nil, "image", func(at *field.Path) {
		if s.Image.Reference == "" {
			p.required(at.Child("reference"), "")
		}
		oneOf(p, at.Child("pullPolicy"), s.Image.PullPolicy, corev1.PullAlways, corev1.PullIfNotPresent, corev1.PullNever)
	})
	for _, f := range foreignVolumes(s) {
		check(true, f, nil)
	}
	if sources == 0 {
		p.required(at, "must specify a volume type")
	}
}

// foreignVolumes names the set sources whose details we do not check, since
// no node of ours mounts them and Unsupported refuses them.
func foreignVolumes(s *corev1.VolumeSource) []string {
	var set []string
	for name, is := range map[string]bool{
		"gcePersistentDisk": s.GCEPersistentDisk != nil, "awsElasticBlockStore": s.AWSElasticBlockStore != nil,
		"gitRepo": s.GitRepo != nil, "iscsi": s.ISCSI != nil, "glusterfs": s.Glusterfs != nil, "rbd": s.RBD != nil,
		"flexVolume": s.FlexVolume != nil, "cinder": s.Cinder != nil, "cephfs": s.CephFS != nil,
		"flocker": s.Flocker != nil, "fc": s.FC != nil, "azureFile": s.AzureFile != nil,
		"vsphereVolume": s.VsphereVolume != nil, "quobyte": s.Quobyte != nil, "azureDisk": s.AzureDisk != nil,
		"photonPersistentDisk": s.PhotonPersistentDisk != nil, "portworxVolume": s.PortworxVolume != nil,
		"scaleIO": s.ScaleIO != nil, "storageos": s.StorageOS != nil, "csi": s.CSI != nil,
	} {
		if is {
			set = append(set, name)
		}
	}
	return set
}

func (p *problems) emptyDir(at *field.Path, e *corev1.EmptyDirVolumeSource) {
	if e.SizeLimit != nil {
		if e.SizeLimit.Sign() < 0 {
			p.forbidden(at.Child("sizeLimit"), "SizeLimit field must be a valid resource quantity")
		}
		p.wholeBytes(at.Child("sizeLimit"), *e.SizeLimit)
	}
}

func (p *problems) hostPath(at *field.Path, h *corev1.HostPathVolumeSource) {
	if h.Path == "" {
		p.required(at.Child("path"), "")
		return
	}
	p.noBacksteps(at.Child("path"), h.Path)
	supportedIfSet(p, at.Child("type"), h.Type, corev1.HostPathUnset, corev1.HostPathBlockDev, corev1.HostPathCharDev,
		corev1.HostPathDirectory, corev1.HostPathDirectoryOrCreate, corev1.HostPathFile, corev1.HostPathFileOrCreate, corev1.HostPathSocket)
}

func (p *problems) nfs(at *field.Path, n *corev1.NFSVolumeSource) {
	if n.Server == "" {
		p.required(at.Child("server"), "")
	}
	if n.Path == "" {
		p.required(at.Child("path"), "")
	}
	if !path.IsAbs(n.Path) {
		p.invalid(at.Child("path"), n.Path, "must be an absolute path")
	}
}

func (p *problems) projected(at *field.Path, v *corev1.ProjectedVolumeSource) {
	paths := names{}
	for i := range v.Sources {
		src, srcPath, sources := &v.Sources[i], at.Child("sources").Index(i), 0
		items := func(in *field.Path, name string, items []corev1.KeyToPath) {
			sources++
			if name == "" {
				p.required(in.Child("name"), "")
			}
			p.keysToPaths(in.Child("items"), items)
			for _, it := range items {
				if it.Path != "" && paths.seen(it.Path) {
					p.invalid(at, name, "conflicting duplicate paths")
				}
			}
		}
		if src.Secret != nil {
			items(srcPath.Child("secret"), src.Secret.Name, src.Secret.Items)
		}
		if src.ConfigMap != nil {
			items(srcPath.Child("configMap"), src.ConfigMap.Name, src.ConfigMap.Items)
		}
		if src.DownwardAPI != nil {
			sources++
			for j := range src.DownwardAPI.Items {
				f := &src.DownwardAPI.Items[j]
				p.downwardFile(srcPath.Child("downwardAPI"), f)
				if f.Path != "" && paths.seen(f.Path) {
					p.invalid(at, f.Path, "conflicting duplicate paths")
				}
			}
		}
		if src.ServiceAccountToken != nil {
			sources++
			p.tokenProjection(at, srcPath.Child("serviceAccountToken"), src.ServiceAccountToken)
		}
		if src.ClusterTrustBundle != nil {
			sources++
		}
		if src.PodCertificate != nil {
			sources++
		}
		if sources > 1 {
			p.forbidden(srcPath, "may not specify more than 1 volume type per source")
		}
	}
}

func (p *problems) tokenProjection(volume, at *field.Path, t *corev1.ServiceAccountTokenProjection) {
	expiry := at.Child("expirationSeconds")
	switch e := t.ExpirationSeconds; {
	case e == nil:
		p.required(expiry, "")
	case *e < 10*60:
		p.invalid(expiry, *e, "may not specify a duration less than 10 minutes")
	case *e > 1<<32:
		p.invalid(expiry, *e, "may not specify a duration larger than 2^32 seconds")
	}
	if t.Path == "" {
		p.required(volume.Child("path"), "")
	} else {
		p.localPath(volume.Child("path"), t.Path)
	}
}

func (p *problems) keysToPaths(at *field.Path, items []corev1.KeyToPath) {
	for i := range items {
		it, itPath := &items[i], at.Index(i)
		if it.Key == "" {
			p.required(itPath.Child("key"), "")
		}
		if it.Path == "" {
			p.required(itPath.Child("path"), "")
		}
		p.localPath(itPath.Child("path"), it.Path)
		p.fileMode(itPath.Child("mode"), it.Mode)
	}
}

func (p *problems) downwardFile(at *field.Path, f *corev1.DownwardAPIVolumeFile) {
	if f.Path == "" {
		p.required(at.Child("path"), "")
	}
	p.localPath(at.Child("path"), f.Path)
	switch {
	case f.FieldRef != nil:
		p.fieldRef(at.Child("fieldRef"), f.FieldRef, volumeFields)
		if f.ResourceFieldRef != nil {
			p.invalid(at, "resource", "fieldRef and resourceFieldRef can not be specified simultaneously")
		}
	case f.ResourceFieldRef != nil:
		p.resourceFieldRef(at.Child("resourceFieldRef"), f.ResourceFieldRef, true)
	default:
		p.required(at, "one of fieldRef and resourceFieldRef is required")
	}
	p.fileMode(at.Child("mode"), f.Mode)
}

func (p *problems) fileMode(at *field.Path, mode *int32) {
	if mode != nil && (*mode > 0o777 || *mode < 0) {
		p.invalid(at, *mode, "must be a number between 0 and 0777 (octal), both inclusive")
	}
}

// descendingPath: relative and without "..".
func (p *problems) descendingPath(at *field.Path, v string) {
	if path.IsAbs(v) {
		p.invalid(at, v, "must be a relative path")
	}
	p.noBacksteps(at, v)
}

func (p *problems) noBacksteps(at *field.Path, v string) {
	for _, part := range strings.Split(v, "/") {
		if part == ".." {
			p.invalid(at, v, "must not contain '..'")
			return
		}
	}
}

// localPath: a descendingPath whose first element does not start with "..",
// which the atomic writer keeps for itself.
func (p *problems) localPath(at *field.Path, v string) {
	p.descendingPath(at, v)
	if strings.HasPrefix(v, "..") && !strings.HasPrefix(v, "../") {
		p.invalid(at, v, "must not start with '..'")
	}
}

// mounts checks a container's mounts against the pod's volumes.
func (p *problems) mounts(at *field.Path, c *corev1.Container, volumes map[string]*corev1.VolumeSource) {
	points := names{}
	for i := range c.VolumeMounts {
		m, one := &c.VolumeMounts[i], at.Index(i)
		if m.Name == "" {
			p.required(one.Child("name"), "")
		}
		if volumes[m.Name] == nil {
			p.add(field.NotFound(one.Child("name"), m.Name))
		}
		if m.MountPath == "" {
			p.required(one.Child("mountPath"), "")
		}
		if points.seen(m.MountPath) {
			p.invalid(one.Child("mountPath"), m.MountPath, "must be unique")
		}
		for _, d := range c.VolumeDevices {
			if d.Name == m.Name {
				p.invalid(one.Child("name"), m.Name, "must not already exist in volumeDevices")
			}
			if d.DevicePath == m.MountPath {
				p.invalid(one.Child("mountPath"), m.MountPath, "must not already exist as a path in volumeDevices")
			}
		}
		if m.SubPath != "" {
			p.descendingPath(at.Child("subPath"), m.SubPath)
		}
		if m.SubPathExpr != "" {
			if m.SubPath != "" {
				p.invalid(one.Child("subPathExpr"), m.SubPathExpr, "subPathExpr and subPath are mutually exclusive")
			}
			p.descendingPath(at.Child("subPathExpr"), m.SubPathExpr)
		}
		p.mountOptions(at, m, c)
	}
}

func (p *problems) mountOptions(at *field.Path, m *corev1.VolumeMount, c *corev1.Container) {
	if m.MountPropagation != nil {
		supported(p, at.Child("mountPropagation"), *m.MountPropagation,
			corev1.MountPropagationBidirectional, corev1.MountPropagationHostToContainer, corev1.MountPropagationNone)
		privileged := c.SecurityContext != nil && c.SecurityContext.Privileged != nil && *c.SecurityContext.Privileged
		if *m.MountPropagation == corev1.MountPropagationBidirectional && !privileged {
			p.forbidden(at.Child("mountPropagation"), "Bidirectional mount propagation is available only to privileged containers")
		}
	}
	if m.RecursiveReadOnly == nil || *m.RecursiveReadOnly == corev1.RecursiveReadOnlyDisabled {
		return
	}
	rro := at.Child("recursiveReadOnly")
	if !supported(p, rro, *m.RecursiveReadOnly, corev1.RecursiveReadOnlyDisabled, corev1.RecursiveReadOnlyEnabled, corev1.RecursiveReadOnlyIfPossible) {
		return
	}
	if !m.ReadOnly {
		p.forbidden(rro, "may only be specified when readOnly is true")
	}
	if m.MountPropagation != nil && *m.MountPropagation != corev1.MountPropagationNone {
		p.forbidden(rro, "may only be specified when mountPropagation is None or not specified")
	}
}

// What a field reference may name, in environment variables and in volumes.
var (
	envFields = []string{"metadata.name", "metadata.namespace", "metadata.uid", "spec.nodeName", "spec.serviceAccountName",
		"status.hostIP", "status.hostIPs", "status.podIP", "status.podIPs"}
	volumeFields   = []string{"metadata.annotations", "metadata.labels", "metadata.name", "metadata.namespace", "metadata.uid"}
	otherFields    = []string{"spec.restartPolicy", "spec.schedulerName", "status.phase"}
	resourceFields = []string{"limits.cpu", "limits.ephemeral-storage", "limits.memory",
		"requests.cpu", "requests.ephemeral-storage", "requests.memory"}
)

func (p *problems) fieldRef(at *field.Path, f *corev1.ObjectFieldSelector, allowed []string) {
	if f.APIVersion == "" {
		p.required(at.Child("apiVersion"), "")
		return
	}
	if f.FieldPath == "" {
		p.required(at.Child("fieldPath"), "")
		return
	}
	bad := func(reason string) {
		p.invalid(at.Child("fieldPath"), f.FieldPath, "error converting fieldPath: "+reason)
	}
	if f.APIVersion != "v1" {
		bad("unsupported pod version: " + f.APIVersion)
		return
	}
	if base, key, ok := subscript(f.FieldPath); ok {
		switch base {
		case "metadata.annotations":
			p.qualifiedName(at, strings.ToLower(key))
		case "metadata.labels":
			p.qualifiedName(at, key)
		default:
			bad("field label does not support subscript: " + f.FieldPath)
		}
		return
	}
	name := f.FieldPath
	if name == "spec.host" {
		name = "spec.nodeName" // what very old clients call it
	}
	if !contains(envFields, name) && !contains(volumeFields, name) && !contains(otherFields, name) {
		bad("field label not supported: " + name)
		return
	}
	if !contains(allowed, name) {
		p.add(field.NotSupported(at.Child("fieldPath"), name, allowed))
	}
}

// subscript splits metadata.labels['key'].
func subscript(fieldPath string) (base, key string, ok bool) {
	inner, ok := strings.CutSuffix(fieldPath, "']")
	if !ok {
		return fieldPath, "", false
	}
	base, key, ok = strings.Cut(inner, "['")
	if !ok || base == "" {
		return fieldPath, "", false
	}
	return base, key, true
}

func contains(list []string, v string) bool {
	for _, s := range list {
		if s == v {
			return true
		}
	}
	return false
}

func (p *problems) resourceFieldRef(at *field.Path, f *corev1.ResourceFieldSelector, volume bool) {
	huge := strings.HasPrefix(f.Resource, "requests.hugepages-") || strings.HasPrefix(f.Resource, "limits.hugepages-")
	switch {
	case volume && f.ContainerName == "":
		p.required(at.Child("containerName"), "")
	case f.Resource == "":
		p.required(at.Child("resource"), "")
	case !huge && !contains(resourceFields, f.Resource):
		p.add(field.NotSupported(at.Child("resource"), f.Resource, resourceFields))
	}
	if f.Divisor.IsZero() {
		return
	}
	const bytes = "only divisor's values 1, 1k, 1M, 1G, 1T, 1P, 1E, 1Ki, 1Mi, 1Gi, 1Ti, 1Pi, 1Ei are supported with the "
	divisor, isByte := f.Divisor.String(), false
	for _, unit := range []string{"", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"} {
		isByte = isByte || divisor == "1"+unit
	}
	switch _, what, _ := strings.Cut(f.Resource, "."); {
	case what == "cpu" && divisor != "1" && divisor != "1m":
		p.invalid(at.Child("divisor"), f.Resource, "only divisor's values 1m and 1 are supported with the cpu resource")
	case what == "memory" && !isByte:
		p.invalid(at.Child("divisor"), f.Resource, bytes+"memory resource")
	case what == "ephemeral-storage" && !isByte:
		p.invalid(at.Child("divisor"), f.Resource, bytes+"local ephemeral storage resource")
	case huge && !isByte:
		p.invalid(at.Child("divisor"), f.Resource, bytes+"hugepages resource")
	}
}

// portConflicts finds host ports used twice among containers that run at the
// same time.
func (p *problems) portConflicts(at *field.Path, cs []corev1.Container) {
	used := names{}
	for i := range cs {
		for j, port := range cs[i].Ports {
			if port.HostPort == 0 {
				continue
			}
			key := string(port.Protocol) + "/" + port.HostIP + "/" + itoa(port.HostPort)
			if used.seen(key) {
				p.duplicate(at.Index(i).Child("ports").Index(j).Child("hostPort"), key)
			}
		}
	}
}

func (p *problems) ports(at *field.Path, ports []corev1.ContainerPort) {
	used := names{}
	for i := range ports {
		port, one := &ports[i], at.Index(i)
		if port.Name != "" {
			if msgs := validation.IsValidPortName(port.Name); len(msgs) > 0 {
				p.invalid(one.Child("name"), port.Name, msgs...)
			} else if used.seen(port.Name) {
				p.duplicate(one.Child("name"), port.Name)
			}
		}
		if port.ContainerPort == 0 {
			p.required(one.Child("containerPort"), "")
		} else {
			p.portNumber(one.Child("containerPort"), port.ContainerPort)
		}
		if port.HostPort != 0 {
			p.portNumber(one.Child("hostPort"), port.HostPort)
		}
		oneOf(p, one.Child("protocol"), port.Protocol, corev1.ProtocolSCTP, corev1.ProtocolTCP, corev1.ProtocolUDP)
	}
}
