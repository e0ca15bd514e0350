package printers

import (
	"reflect"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/manifests"
)

const (
	unset       = "<unset>"
	terminating = "Terminating"
)

// addStorage registers volumes, claims and the kinds of storage.k8s.io.
func addStorage(m map[reflect.Type]*printer) {
	volume, volumeStatus := corev1.PersistentVolumeSpec{}.SwaggerDoc(), corev1.PersistentVolumeStatus{}.SwaggerDoc()
	add(m, []metav1.TableColumnDefinition{
		nameColumn(),
		column("Capacity", volume["capacity"]),
		column("Access Modes", volume["accessModes"]),
		column("Reclaim Policy", volume["persistentVolumeReclaimPolicy"]),
		column("Status", volumeStatus["phase"]),
		column("Claim", volume["claimRef"]),
		column("StorageClass", "StorageClass of the pv"),
		column("VolumeAttributesClass", "VolumeAttributesClass of the pv"),
		column("Reason", volumeStatus["reason"]),
		ageColumn(),
		wide(column("VolumeMode", volume["volumeMode"])),
	}, volumeRow)
	claim, claimStatus := corev1.PersistentVolumeClaimSpec{}.SwaggerDoc(), corev1.PersistentVolumeClaimStatus{}.SwaggerDoc()
	add(m, []metav1.TableColumnDefinition{
		nameColumn(),
		column("Status", claimStatus["phase"]),
		column("Volume", claim["volumeName"]),
		column("Capacity", claimStatus["capacity"]),
		column("Access Modes", claimStatus["accessModes"]),
		column("StorageClass", "StorageClass of the pvc"),
		column("VolumeAttributesClass", "VolumeAttributesClass of the pvc"),
		ageColumn(),
		wide(column("VolumeMode", claim["volumeMode"])),
	}, claimRow)
	class := storagev1.StorageClass{}.SwaggerDoc()
	add(m, []metav1.TableColumnDefinition{
		nameColumn(),
		column("Provisioner", class["provisioner"]),
		column("ReclaimPolicy", class["reclaimPolicy"]),
		column("VolumeBindingMode", class["volumeBindingMode"]),
		column("AllowVolumeExpansion", class["allowVolumeExpansion"]),
		ageColumn(),
	}, classRow)
	addCSI(m)
}

func addCSI(m map[reflect.Type]*printer) {
	driver := storagev1.CSIDriverSpec{}.SwaggerDoc()
	add(m, []metav1.TableColumnDefinition{
		nameColumn(), typed("integer", column("Drivers", "Drivers indicates the number of CSI drivers registered on the node")), ageColumn(),
	}, func(o *storagev1.CSINode, now time.Time) []any {
		return []any{o.Name, int64(len(o.Spec.Drivers)), age(o.CreationTimestamp, now)}
	})
	add(m, []metav1.TableColumnDefinition{
		nameColumn(),
		typed("boolean", column("AttachRequired", driver["attachRequired"])),
		typed("boolean", column("PodInfoOnMount", driver["podInfoOnMount"])),
		typed("boolean", column("StorageCapacity", driver["storageCapacity"])),
		column("TokenRequests", driver["tokenRequests"]),
		typed("boolean", column("RequiresRepublish", driver["requiresRepublish"])),
		column("Modes", driver["volumeLifecycleModes"]),
		ageColumn(),
	}, driverRow)
	capacity := storagev1.CSIStorageCapacity{}.SwaggerDoc()
	add(m, []metav1.TableColumnDefinition{
		nameColumn(), column("StorageClassName", capacity["storageClassName"]), column("Capacity", capacity["capacity"]),
	}, func(o *storagev1.CSIStorageCapacity, _ time.Time) []any {
		size := unset
		if o.Capacity != nil {
			size = o.Capacity.String()
		}
		return []any{o.Name, o.StorageClassName, size}
	})
	attach := storagev1.VolumeAttachmentSpec{}.SwaggerDoc()
	attacher := column("Attacher", attach["attacher"])
	attacher.Format = "name"
	add(m, []metav1.TableColumnDefinition{
		nameColumn(), attacher,
		column("PV", storagev1.VolumeAttachmentSource{}.SwaggerDoc()["persistentVolumeName"]),
		column("Node", attach["nodeName"]),
		typed("boolean", column("Attached", storagev1.VolumeAttachmentStatus{}.SwaggerDoc()["attached"])),
		ageColumn(),
	}, func(o *storagev1.VolumeAttachment, now time.Time) []any {
		name := ""
		if v := o.Spec.Source.PersistentVolumeName; v != nil {
			name = *v
		}
		return []any{o.Name, o.Spec.Attacher, name, o.Spec.NodeName, o.Status.Attached, age(o.CreationTimestamp, now)}
	})
	add(m, []metav1.TableColumnDefinition{nameColumn(), column("DriverName", storagev1.VolumeAttributesClass{}.SwaggerDoc()["driverName"]), ageColumn()},
		func(o *storagev1.VolumeAttributesClass, now time.Time) []any {
			return []any{o.Name, o.DriverName, age(o.CreationTimestamp, now)}
		})
}

func volumeRow(o *corev1.PersistentVolume, now time.Time) []any {
	claim := ""
	if r := o.Spec.ClaimRef; r != nil {
		claim = r.Namespace + "/" + r.Name
	}
	phase := string(o.Status.Phase)
	if o.DeletionTimestamp != nil {
		phase = terminating
	}
	size := o.Spec.Capacity[corev1.ResourceStorage]
	return []any{
		o.Name, size.String(), AccessModes(o.Spec.AccessModes), string(o.Spec.PersistentVolumeReclaimPolicy), phase, claim,
		manifests.VolumeClass(o), orUnset(o.Spec.VolumeAttributesClassName), o.Status.Reason, age(o.CreationTimestamp, now), orUnset(o.Spec.VolumeMode),
	}
}

func claimRow(o *corev1.PersistentVolumeClaim, now time.Time) []any {
	phase, size, modes := string(o.Status.Phase), "", ""
	if o.DeletionTimestamp != nil {
		phase = terminating
	}
	if o.Spec.VolumeName != "" {
		q := o.Status.Capacity[corev1.ResourceStorage]
		size, modes = q.String(), AccessModes(o.Status.AccessModes)
	}
	return []any{
		o.Name, phase, o.Spec.VolumeName, size, modes, manifests.ClaimClass(o), orUnset(o.Spec.VolumeAttributesClassName),
		age(o.CreationTimestamp, now), orUnset(o.Spec.VolumeMode),
	}
}

func classRow(o *storagev1.StorageClass, now time.Time) []any {
	name := o.Name
	if manifests.IsDefaultClass(o) {
		name += " (default)"
	}
	policy, mode := string(corev1.PersistentVolumeReclaimDelete), string(storagev1.VolumeBindingImmediate)
	if o.ReclaimPolicy != nil {
		policy = string(*o.ReclaimPolicy)
	}
	if o.VolumeBindingMode != nil {
		mode = string(*o.VolumeBindingMode)
	}
	return []any{name, o.Provisioner, policy, mode, o.AllowVolumeExpansion != nil && *o.AllowVolumeExpansion, age(o.CreationTimestamp, now)}
}

func driverRow(o *storagev1.CSIDriver, now time.Time) []any {
	s := &o.Spec
	is := func(b *bool, otherwise bool) bool {
		if b == nil {
			return otherwise
		}
		return *b
	}
	modes := make([]string, 0, len(s.VolumeLifecycleModes))
	for _, m := range s.VolumeLifecycleModes {
		modes = append(modes, string(m))
	}
	tokens := unset
	if s.TokenRequests != nil {
		var list []string
		for _, t := range s.TokenRequests {
			list = append(list, t.Audience)
		}
		tokens = strings.Join(list, ",")
	}
	return []any{
		o.Name, is(s.AttachRequired, true), is(s.PodInfoOnMount, false), is(s.StorageCapacity, false), tokens,
		is(s.RequiresRepublish, false), orNone(strings.Join(modes, ",")), age(o.CreationTimestamp, now),
	}
}

// AccessModes is how people write access modes: "RWO,ROX".
func AccessModes(modes []corev1.PersistentVolumeAccessMode) string {
	var out []string
	for _, m := range []struct {
		mode  corev1.PersistentVolumeAccessMode
		short string
	}{
		{corev1.ReadWriteOnce, "RWO"}, {corev1.ReadOnlyMany, "ROX"}, {corev1.ReadWriteMany, "RWX"}, {corev1.ReadWriteOncePod, "RWOP"},
	} {
		if slices.Contains(modes, m.mode) {
			out = append(out, m.short)
		}
	}
	return strings.Join(out, ",")
}

func orUnset[T ~string](s *T) string {
	if s == nil {
		return unset
	}
	return string(*s)
}
