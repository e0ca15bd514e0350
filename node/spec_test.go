package node

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// The cluster's files are read-only whatever a mount says; what the pod writes
// to is not.
func TestVolumesThatPodsMayNotWrite(t *testing.T) {
	pod := &corev1.Pod{}
	want := map[string]bool{"empty": false, "host": false, "config": true, "secret": true, "projected": true, "downward": true}
	pod.Spec.Volumes = []corev1.Volume{
		{Name: "empty", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
		{Name: "host", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{}}},
		{Name: "config", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{}}},
		{Name: "secret", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{}}},
		{Name: "projected", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{}}},
		{Name: "downward", VolumeSource: corev1.VolumeSource{DownwardAPI: &corev1.DownwardAPIVolumeSource{}}},
	}
	c := &corev1.Container{}
	paths := map[string]string{}
	for name := range want {
		paths[name] = "/volumes/" + name
		c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: name, MountPath: "/" + name})
	}
	mounts, err := resolveMounts(c, paths, readOnlyVolumes(pod), nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range mounts {
		if m.ReadOnly != want[m.Target[1:]] {
			t.Errorf("%s: read-only %v", m.Target, m.ReadOnly)
		}
	}
}
