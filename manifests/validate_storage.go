package manifests

import (
	"strings"

	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// Bounds of classes and attachments.
const (
	maxParameters     = 512
	maxParameterBytes = 256 << 10
	maxErrorMessage   = 1024
	maxNodeID         = 256
)

// storage checks the kinds of storage.k8s.io.
func (p *problems) storage(obj runtime.Object, create bool) {
	switch o := obj.(type) {
	case *storagev1.StorageClass:
		if create {
			p.storageClass(o)
		}
	case *storagev1.CSIDriver:
		p.driver(&o.Spec)
	case *storagev1.CSINode:
		p.storageNode(o)
	case *storagev1.CSIStorageCapacity:
		if create {
			if o.NodeTopology != nil {
				p.selector(field.NewPath("nodeTopology"), o.NodeTopology)
			}
			p.dnsSubdomain(field.NewPath("storageClassName"), o.StorageClassName)
			if o.Capacity != nil && o.Capacity.Sign() < 0 {
				p.invalid(field.NewPath("capacity"), o.Capacity.String(), "must be greater than or equal to 0")
			}
		}
	case *storagev1.VolumeAttachment:
		p.attachment(o)
	case *storagev1.VolumeAttributesClass:
		p.provisioner(field.NewPath("driverName"), o.DriverName)
		p.parameters(field.NewPath("parameters"), o.Parameters)
		if len(o.Parameters) == 0 {
			p.required(field.NewPath("parameters"), "must contain at least one key/value pair")
		}
	}
}

// storageUpdate checks what may not change.
func (p *problems) storageUpdate(obj, old runtime.Object) {
	switch o := obj.(type) {
	case *storagev1.StorageClass:
		was := old.(*storagev1.StorageClass)
		p.immutable(field.NewPath("parameters"), o.Parameters, was.Parameters)
		p.immutable(field.NewPath("provisioner"), o.Provisioner, was.Provisioner)
		p.immutable(field.NewPath("reclaimPolicy"), o.ReclaimPolicy, was.ReclaimPolicy)
		p.immutable(field.NewPath("volumeBindingMode"), o.VolumeBindingMode, was.VolumeBindingMode)
	case *storagev1.CSIDriver:
		was := old.(*storagev1.CSIDriver)
		p.immutable(specPath.Child("attachedRequired"), o.Spec.AttachRequired, was.Spec.AttachRequired)
		p.immutable(specPath.Child("volumeLifecycleModes"), o.Spec.VolumeLifecycleModes, was.Spec.VolumeLifecycleModes)
	case *storagev1.CSINode:
		for _, before := range old.(*storagev1.CSINode).Spec.Drivers {
			for _, now := range o.Spec.Drivers {
				if now.Name == before.Name {
					now.Allocatable, before.Allocatable = nil, nil
					p.immutable(specPath.Child("drivers"), now, before)
				}
			}
		}
	case *storagev1.CSIStorageCapacity:
		was := old.(*storagev1.CSIStorageCapacity)
		if !equality.Semantic.DeepEqual(o.NodeTopology, was.NodeTopology) {
			p.invalid(field.NewPath("nodeTopology"), o.NodeTopology, "field is immutable")
		}
		if o.StorageClassName != was.StorageClassName {
			p.invalid(field.NewPath("storageClassName"), o.StorageClassName, "field is immutable")
		}
	case *storagev1.VolumeAttachment:
		p.immutable(specPath, o.Spec, old.(*storagev1.VolumeAttachment).Spec)
	case *storagev1.VolumeAttributesClass:
		was := old.(*storagev1.VolumeAttributesClass)
		if o.DriverName != was.DriverName {
			p.forbidden(field.NewPath("driverName"), "updates to driverName are forbidden.")
		}
		if !equality.Semantic.DeepEqual(o.Parameters, was.Parameters) {
			p.forbidden(field.NewPath("parameters"), "updates to parameters are forbidden.")
		}
	}
}

func (p *problems) provisioner(at *field.Path, name string) {
	if name == "" {
		p.required(at, "")
		return
	}
	p.qualifiedName(at, strings.ToLower(name))
}

func (p *problems) parameters(at *field.Path, params map[string]string) {
	if len(params) > maxParameters {
		p.add(field.TooLong(at, "", maxParameters))
		return
	}
	size := 0
	for k, v := range params {
		if k == "" {
			p.invalid(at, k, "field can not be empty.")
		}
		size += len(k) + len(v)
	}
	if size > maxParameterBytes {
		p.add(field.TooLong(at, "", maxParameterBytes))
	}
}

func (p *problems) storageClass(c *storagev1.StorageClass) {
	p.provisioner(field.NewPath("provisioner"), c.Provisioner)
	p.parameters(field.NewPath("parameters"), c.Parameters)
	if r := c.ReclaimPolicy; r != nil && *r != "" {
		supported(p, field.NewPath("reclaimPolicy"), *r, "Delete", "Retain")
	}
	mode := field.NewPath("volumeBindingMode")
	if c.VolumeBindingMode == nil {
		p.required(mode, "")
	} else {
		supported(p, mode, *c.VolumeBindingMode, storagev1.VolumeBindingImmediate, storagev1.VolumeBindingWaitForFirstConsumer)
	}
	p.topologies(field.NewPath("allowedTopologies"), c)
}

func (p *problems) topologies(at *field.Path, c *storagev1.StorageClass) {
	for i, t := range c.AllowedTopologies {
		keys := names{}
		for j, e := range t.MatchLabelExpressions {
			one := at.Index(i).Child("matchLabelExpressions").Index(j)
			values := names{}
			if len(e.Values) == 0 {
				p.required(one.Child("values"), "")
			}
			for k, v := range e.Values {
				if values.seen(v) {
					p.duplicate(one.Child("values").Index(k), v)
				}
			}
			p.labelName(one.Child("key"), e.Key)
			if keys.seen(e.Key) {
				p.duplicate(one.Child("key"), e.Key)
			}
		}
		for _, before := range c.AllowedTopologies[:i] {
			if equality.Semantic.DeepEqual(before, t) {
				p.duplicate(at.Index(i).Child("matchLabelExpressions"), "")
				break
			}
		}
	}
}

func (p *problems) driver(s *storagev1.CSIDriverSpec) {
	for name, b := range map[string]*bool{"attachedRequired": s.AttachRequired, "podInfoOnMount": s.PodInfoOnMount,
		"storageCapacity": s.StorageCapacity, "seLinuxMount": s.SELinuxMount, "preventPodSchedulingIfMissing": s.PreventPodSchedulingIfMissing} {
		if b == nil {
			p.required(specPath.Child(name), "")
		}
	}
	supportedIfSet(p, specPath.Child("fsGroupPolicy"), s.FSGroupPolicy,
		storagev1.FileFSGroupPolicy, storagev1.NoneFSGroupPolicy, storagev1.ReadWriteOnceWithFSTypeFSGroupPolicy)
	audiences := names{}
	for i, t := range s.TokenRequests {
		one := specPath.Child("tokenRequests").Index(i)
		if audiences.seen(t.Audience) {
			p.duplicate(one.Child("audience"), t.Audience)
			continue
		}
		if e := t.ExpirationSeconds; e != nil && *e < 600 {
			p.invalid(one.Child("expirationSeconds"), *e, "may not specify a duration less than 10 minutes")
		} else if e != nil && *e > 1<<32 {
			p.invalid(one.Child("expirationSeconds"), *e, "may not specify a duration larger than 2^32 seconds")
		}
	}
	for _, m := range s.VolumeLifecycleModes {
		supported(p, specPath.Child("volumeLifecycleModes"), m, storagev1.VolumeLifecyclePersistent, storagev1.VolumeLifecycleEphemeral)
	}
	if n := s.NodeAllocatableUpdatePeriodSeconds; n != nil && *n < 10 {
		p.invalid(specPath.Child("nodeAllocatableUpdatePeriodSeconds"), *n, "must be greater than or equal to 10 seconds")
	}
	if s.ServiceAccountTokenInSecrets != nil && len(s.TokenRequests) == 0 {
		p.invalid(specPath.Child("serviceAccountTokenInSecrets"), s.ServiceAccountTokenInSecrets, "serviceAccountTokenInSecrets is set but no tokenRequests are specified")
	}
}

func (p *problems) storageNode(n *storagev1.CSINode) {
	drivers := names{}
	for i, d := range n.Spec.Drivers {
		one := specPath.Child("drivers").Index(i)
		p.driverName(one.Child("name"), d.Name)
		switch {
		case d.NodeID == "":
			p.required(one.Child("nodeID"), "")
		case len(d.NodeID) > maxNodeID:
			p.invalid(one.Child("nodeID"), d.NodeID, "must be 256 characters or less")
		}
		if d.Allocatable != nil && d.Allocatable.Count != nil {
			p.nonNegative(one.Child("allocatable", "count"), int64(*d.Allocatable.Count))
		}
		if drivers.seen(d.Name) {
			p.duplicate(one.Child("name"), d.Name)
		}
		keys := names{}
		for _, k := range d.TopologyKeys {
			if k == "" {
				p.required(one, k)
			}
			if keys.seen(k) {
				p.duplicate(one, k)
			}
			p.qualifiedName(one, k)
		}
	}
}

func (p *problems) attachment(a *storagev1.VolumeAttachment) {
	p.driverName(specPath.Child("attacher"), a.Spec.Attacher)
	src, at := &a.Spec.Source, specPath.Child("source")
	name := src.PersistentVolumeName
	switch {
	case src.InlineVolumeSpec == nil && name == nil:
		p.required(at, "must specify exactly one of inlineVolumeSpec and persistentVolumeName")
	case src.InlineVolumeSpec != nil && name != nil:
		p.forbidden(at, "must specify exactly one of inlineVolumeSpec and persistentVolumeName")
	case name != nil && *name == "":
		p.required(at.Child("persistentVolumeName"), "must specify non empty persistentVolumeName")
	case src.InlineVolumeSpec != nil && src.InlineVolumeSpec.CSI == nil:
		p.required(at.Child("inlineVolumeSpec", "csi"), "has to be specified in the context of inline volumes")
	}
	if name != nil {
		p.dnsSubdomain(field.NewPath("spec.source.persistentVolumeName"), *name)
	}
	p.dnsSubdomain(specPath.Child("nodeName"), a.Spec.NodeName)
	size := 0
	for k, v := range a.Status.AttachmentMetadata {
		size += len(k) + len(v)
	}
	if size > maxParameterBytes {
		p.add(field.TooLong(statusPath.Child("attachmentMetadata"), "", maxParameterBytes))
	}
	for name, e := range map[string]*storagev1.VolumeError{"attachError": a.Status.AttachError, "detachError": a.Status.DetachError} {
		if e != nil && len(e.Message) > maxErrorMessage {
			p.add(field.TooLong(statusPath.Child(name, "message"), "", maxErrorMessage))
		}
		if e != nil && e.ErrorCode != nil {
			p.nonNegative(statusPath.Child(name, "errorCode"), int64(*e.ErrorCode))
		}
	}
}
