package manifests

import (
	"path"
	"sort"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// accessModes checks the modes of a claim or volume.
func (p *problems) accessModes(at *field.Path, modes []corev1.PersistentVolumeAccessMode) {
	alone, others := false, false
	for _, m := range modes {
		ok := supported(p, at, m, corev1.ReadOnlyMany, corev1.ReadWriteMany, corev1.ReadWriteOnce, corev1.ReadWriteOncePod)
		alone, others = alone || m == corev1.ReadWriteOncePod, others || ok && m != corev1.ReadWriteOncePod
	}
	if alone && others {
		p.forbidden(at, "may not use ReadWriteOncePod with other access modes")
	}
}

func (p *problems) positiveSize(at *field.Path, q resource.Quantity) bool {
	if q.Sign() <= 0 {
		p.invalid(at, q.String(), "must be greater than zero")
		return false
	}
	return true
}

func (p *problems) className(at *field.Path, name string) {
	if name != "" {
		p.dnsSubdomain(at, name)
	}
}

func (p *problems) claimSpec(at *field.Path, s *corev1.PersistentVolumeClaimSpec) {
	modes := at.Child("accessModes")
	if len(s.AccessModes) == 0 {
		p.required(modes, "at least 1 access mode is required")
	}
	if s.Selector != nil {
		p.selector(at.Child("selector"), s.Selector)
	}
	p.accessModes(modes, s.AccessModes)
	size := at.Child("resources").Key(string(corev1.ResourceStorage))
	if q, ok := s.Resources.Requests[corev1.ResourceStorage]; !ok {
		p.required(size, "")
	} else if p.positiveSize(size, q) {
		p.quantity(size, corev1.ResourceStorage, q)
	}
	if s.StorageClassName != nil {
		p.className(at.Child("storageClassName"), *s.StorageClassName)
	}
	supportedIfSet(p, at.Child("volumeMode"), s.VolumeMode, corev1.PersistentVolumeBlock, corev1.PersistentVolumeFilesystem)
	p.claimSources(at, s)
	if c := s.VolumeAttributesClassName; c != nil {
		p.className(at.Child("volumeAttributesClassName"), *c)
	}
}

func (p *problems) claimSources(at *field.Path, s *corev1.PersistentVolumeClaimSpec) {
	source := func(at *field.Path, group *string, kind, name string) {
		if name == "" {
			p.required(at.Child("name"), "")
		}
		if kind == "" {
			p.required(at.Child("kind"), "")
		}
		switch {
		case group == nil || *group == "":
			if kind != "PersistentVolumeClaim" {
				p.invalid(at, kind, "must be 'PersistentVolumeClaim' when referencing the default apiGroup")
			}
		default:
			p.dnsSubdomain(at.Child("apiGroup"), *group)
		}
	}
	d, r := s.DataSource, s.DataSourceRef
	if d != nil {
		source(at.Child("dataSource"), d.APIGroup, d.Kind, d.Name)
	}
	if r == nil {
		return
	}
	ref := at.Child("dataSourceRef")
	source(ref, r.APIGroup, r.Kind, r.Name)
	foreign := r.Namespace != nil && *r.Namespace != ""
	if foreign {
		p.dnsLabel(ref.Child("namespace"), *r.Namespace)
	}
	switch {
	case d == nil:
	case foreign:
		p.invalid(at, at.Child("dataSource"), "may not be specified when dataSourceRef.namespace is specified")
	case d.Name != r.Name || d.Kind != r.Kind || !equality.Semantic.DeepEqual(d.APIGroup, r.APIGroup):
		p.invalid(at, at.Child("dataSource"), "must match dataSourceRef")
	}
}

// claimUpdate: all but the size and the volume's name is for ever.
func (p *problems) claimUpdate(c, old *corev1.PersistentVolumeClaim) {
	for _, at := range []string{corev1.BetaStorageClassAnnotation} {
		p.immutable(metadataPath.Child("annotations").Key(at), c.Annotations[at], old.Annotations[at])
	}
	now, was := c.Spec.DeepCopy(), old.Spec.DeepCopy()
	if was.VolumeName == "" {
		was.VolumeName = now.VolumeName
	}
	if was.StorageClassName == nil {
		was.StorageClassName = now.StorageClassName // the default came later
	}
	if c.Status.Phase == corev1.ClaimBound {
		if now.Resources.Requests != nil {
			now.Resources.Requests[corev1.ResourceStorage] = was.Resources.Requests[corev1.ResourceStorage]
		}
		now.VolumeAttributesClassName = was.VolumeAttributesClassName
	}
	if !equality.Semantic.DeepEqual(now, was) {
		p.forbidden(specPath, "spec is immutable after creation except resources.requests and volumeAttributesClassName for bound claims")
	}
	size, before := c.Spec.Resources.Requests[corev1.ResourceStorage], old.Spec.Resources.Requests[corev1.ResourceStorage]
	if size.Cmp(before) < 0 {
		if has := old.Status.Capacity[corev1.ResourceStorage]; size.Cmp(has) <= 0 {
			p.forbidden(specPath.Child("resources", "requests", "storage"), "field can not be less than status.capacity")
		}
	}
	p.immutable(field.NewPath("volumeMode"), c.Spec.VolumeMode, old.Spec.VolumeMode)
	if now := c.Spec.VolumeAttributesClassName; old.Status.CurrentVolumeAttributesClassName != nil && (now == nil || *now == "") {
		p.forbidden(specPath.Child("volumeAttributesClassName"), "update to nil is forbidden when status.currentVolumeAttributesClassName is not nil")
	}
	for name, q := range c.Status.Capacity {
		if at := statusPath.Child("capacity").Key(string(name)); q.Sign() < 0 {
			p.invalid(at, q.String(), "must be a valid resource quantity")
		}
	}
}

func (p *problems) ephemeral(at *field.Path, e *corev1.EphemeralVolumeSource) {
	at = at.Child("volumeClaimTemplate")
	if e.VolumeClaimTemplate == nil {
		p.required(at, "")
		return
	}
	t := e.VolumeClaimTemplate
	p.add(apivalidation.ValidateAnnotations(t.Annotations, at.Child("metadata", "annotations"))...)
	p.labels(at.Child("metadata", "labels"), t.Labels)
	p.claimSpec(at.Child("spec"), &t.Spec)
}

// volumeSources are the sources of a PersistentVolume that are set, by name.
func volumeSources(s *corev1.PersistentVolumeSource) []string {
	var set []string
	for name, is := range map[string]bool{
		"hostPath": s.HostPath != nil, "local": s.Local != nil, "nfs": s.NFS != nil, "csi": s.CSI != nil,
		"gcePersistentDisk": s.GCEPersistentDisk != nil, "awsElasticBlockStore": s.AWSElasticBlockStore != nil,
		"iscsi": s.ISCSI != nil, "glusterfs": s.Glusterfs != nil, "rbd": s.RBD != nil, "flexVolume": s.FlexVolume != nil,
		"cinder": s.Cinder != nil, "cephFS": s.CephFS != nil, "flocker": s.Flocker != nil, "fc": s.FC != nil,
		"azureFile": s.AzureFile != nil, "vsphereVolume": s.VsphereVolume != nil, "quobyte": s.Quobyte != nil,
		"azureDisk": s.AzureDisk != nil, "photonPersistentDisk": s.PhotonPersistentDisk != nil,
		"portworxVolume": s.PortworxVolume != nil, "scaleIO": s.ScaleIO != nil, "storageos": s.StorageOS != nil,
	} {
		if is {
			set = append(set, name)
		}
	}
	sort.Strings(set)
	return set
}

// volumeSpec checks a volume, and the details of the sources that a node of
// ours mounts or that are common.
func (p *problems) volumeSpec(at *field.Path, s *corev1.PersistentVolumeSpec) {
	if len(s.AccessModes) == 0 {
		p.required(at.Child("accessModes"), "")
	}
	p.accessModes(at.Child("accessModes"), s.AccessModes)
	capacity := at.Child("capacity")
	if len(s.Capacity) == 0 {
		p.required(capacity, "")
	}
	if _, ok := s.Capacity[corev1.ResourceStorage]; !ok || len(s.Capacity) > 1 {
		p.add(field.NotSupported(capacity, s.Capacity, []corev1.ResourceName{corev1.ResourceStorage}))
	}
	for name, q := range s.Capacity {
		one := capacity.Key(string(name))
		if q.Sign() < 0 {
			p.invalid(one, q.Value(), "must be a valid resource quantity")
		}
		if p.positiveSize(one, q) {
			p.wholeBytes(one, q)
		}
	}
	if s.PersistentVolumeReclaimPolicy != "" {
		supported(p, at.Child("persistentVolumeReclaimPolicy"), s.PersistentVolumeReclaimPolicy,
			corev1.PersistentVolumeReclaimDelete, corev1.PersistentVolumeReclaimRecycle, corev1.PersistentVolumeReclaimRetain)
	}
	if a := s.NodeAffinity; a != nil {
		if in := at.Child("nodeAffinity", "required"); a.Required == nil {
			p.required(in, "must specify required node constraints")
		} else {
			p.nodeSelector(in, a.Required)
		}
	}
	p.volumeSourceOf(at, s)
	p.className(at.Child("storageClassName"), s.StorageClassName)
	supportedIfSet(p, at.Child("volumeMode"), s.VolumeMode, corev1.PersistentVolumeBlock, corev1.PersistentVolumeFilesystem)
	if c := s.VolumeAttributesClassName; c != nil {
		in := at.Child("volumeAttributesClassName")
		if *c == "" {
			p.required(in, "an empty string is disallowed")
		} else {
			p.dnsSubdomain(in, *c)
		}
		if s.CSI == nil {
			p.required(at.Child("csi"), "has to be specified when using volumeAttributesClassName")
		}
	}
}

func (p *problems) volumeSourceOf(at *field.Path, s *corev1.PersistentVolumeSpec) {
	set := volumeSources(&s.PersistentVolumeSource)
	if len(set) == 0 {
		p.required(at, "must specify a volume type")
	}
	for _, name := range set[min(len(set), 1):] {
		p.forbidden(at.Child(name), "may not specify more than 1 volume type")
	}
	if s.HostPath != nil {
		p.hostPath(at.Child("hostPath"), s.HostPath)
		if path.Clean(s.HostPath.Path) == "/" && s.PersistentVolumeReclaimPolicy == corev1.PersistentVolumeReclaimRecycle {
			p.forbidden(at.Child("persistentVolumeReclaimPolicy"), "may not be 'recycle' for a hostPath mount of '/'")
		}
	}
	if s.Local != nil {
		if in := at.Child("local", "path"); s.Local.Path == "" {
			p.required(in, "")
		} else {
			p.noBacksteps(in, s.Local.Path)
		}
		if s.NodeAffinity == nil {
			p.required(at.Child("nodeAffinity"), "Local volume requires node affinity")
		}
	}
	if s.NFS != nil {
		p.nfs(at.Child("nfs"), s.NFS)
	}
	if s.CSI != nil {
		p.driverName(at.Child("csi", "driver"), s.CSI.Driver)
		if s.CSI.VolumeHandle == "" {
			p.required(at.Child("csi", "volumeHandle"), "")
		}
	}
}

func (p *problems) driverName(at *field.Path, name string) {
	if name == "" {
		p.required(at, "")
		return
	}
	if len(name) > 63 {
		p.add(field.TooLong(at, "", 63))
	}
	p.invalid(at, name, validation.IsDNS1123Subdomain(strings.ToLower(name))...)
}

func (p *problems) volumeUpdate(v, old *corev1.PersistentVolume) {
	now, was := v.Spec.PersistentVolumeSource, old.Spec.PersistentVolumeSource
	if was.CSI != nil && now.CSI != nil && was.CSI.ControllerExpandSecretRef == nil {
		now = *now.DeepCopy()
		now.CSI.ControllerExpandSecretRef = nil // may be set later
	}
	if !equality.Semantic.DeepEqual(now, was) {
		p.forbidden(specPath.Child("persistentvolumesource"), "spec.persistentvolumesource is immutable after creation")
	}
	p.immutable(field.NewPath("volumeMode"), v.Spec.VolumeMode, old.Spec.VolumeMode)
	if old.Spec.NodeAffinity != nil && !equality.Semantic.DeepEqual(v.Spec.NodeAffinity, old.Spec.NodeAffinity) {
		p.invalid(field.NewPath("nodeAffinity"), v.Spec.NodeAffinity, "field is immutable, except for updating from beta label to GA")
	}
	if old.Spec.VolumeAttributesClassName != nil && v.Spec.VolumeAttributesClassName == nil {
		p.forbidden(specPath.Child("volumeAttributesClassName"), "update from non-nil value to nil is forbidden")
	}
}

// claimFields is what Unsupported says of a claim's spec.
var claimFields = sync.OnceValue(func() fieldTable {
	const empty = "not implemented: the volume would begin empty"
	t := fieldTable{
		"dataSource":                {refuse: true, why: empty},
		"dataSourceRef":             {refuse: true, why: empty},
		"volumeMode":                {refuse: true, why: "block devices are not implemented", unless: is(string(corev1.PersistentVolumeFilesystem))},
		"volumeAttributesClassName": {why: "not implemented, ignored"},
		"resources":                 {descend: true},
		"resources.limits":          {why: "not implemented, the request is the size"},
	}
	below(t, "", "accessModes", "selector", "storageClassName", "volumeName")
	below(t, "resources.", "requests")
	return t
})

// claimTemplate puts claimFields below an ephemeral volume.
func claimTemplate(t fieldTable, at string) {
	t[at] = verdict{descend: true}
	t[at+".volumeClaimTemplate"] = verdict{descend: true}
	t[at+".volumeClaimTemplate.metadata"] = implemented
	t[at+".volumeClaimTemplate.spec"] = verdict{descend: true}
	for name, v := range claimFields() {
		t[at+".volumeClaimTemplate.spec."+name] = v
	}
}

// persistentVolumeFields is what Unsupported says of a volume's spec.
var persistentVolumeFields = sync.OnceValue(func() fieldTable {
	t := fieldTable{
		"mountOptions":                  {why: "not implemented, ignored"},
		"volumeAttributesClassName":     {why: "not implemented, ignored"},
		"volumeMode":                    {why: "block devices are not implemented: no pod can use the volume", unless: is(string(corev1.PersistentVolumeFilesystem))},
		"persistentVolumeReclaimPolicy": {why: "not implemented, the volume is kept", unless: is("Retain", "Delete")},
	}
	for _, s := range foreignSources {
		t[s] = verdict{why: "no node mounts this type of volume; implemented are hostPath and local"}
	}
	below(t, "", "capacity", "hostPath", "local", "accessModes", "claimRef", "storageClassName", "nodeAffinity")
	return t
})

var foreignSources = []string{"nfs", "csi", "gcePersistentDisk", "awsElasticBlockStore", "iscsi", "glusterfs", "rbd", "flexVolume", "cinder", "cephfs",
	"flocker", "fc", "azureFile", "vsphereVolume", "quobyte", "azureDisk", "photonPersistentDisk", "portworxVolume", "scaleIO", "storageos"}
