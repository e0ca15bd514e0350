package plugins

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/admission"
)

// ServiceAccount gives every pod a ServiceAccount, which must exist, and,
// unless the pod or the account says no, mounts its token, the cluster's CA
// and the namespace's name where clients look for them.
type ServiceAccount struct{}

const (
	defaultServiceAccount = "default"
	tokenVolumePrefix     = "kube-api-access-"
	tokenMountPath        = "/var/run/secrets/kubernetes.io/serviceaccount"
	// tokenSeconds is the lifetime that the projection asks for, upstream's.
	tokenSeconds = 60*60 + 7
)

// Name implements admission.Plugin.
func (ServiceAccount) Name() string { return "ServiceAccount" }

// Admit implements admission.Plugin.
func (p ServiceAccount) Admit(ctx context.Context, a *admission.Attributes) error {
	pod, ok := newPod(a)
	if !ok || isMirror(pod) {
		return nil
	}
	if pod.Spec.ServiceAccountName == "" {
		pod.Spec.ServiceAccountName = defaultServiceAccount
	}
	pod.Spec.DeprecatedServiceAccount = pod.Spec.ServiceAccountName
	sa, err := p.account(ctx, a, pod.Spec.ServiceAccountName)
	if err != nil {
		return err
	}
	if automount(sa, pod) {
		mountToken(pod)
	}
	if len(pod.Spec.ImagePullSecrets) == 0 {
		for _, s := range sa.ImagePullSecrets {
			pod.Spec.ImagePullSecrets = append(pod.Spec.ImagePullSecrets, corev1.LocalObjectReference{Name: s.Name})
		}
	}
	return nil
}

// Validate implements admission.Plugin.
func (p ServiceAccount) Validate(_ context.Context, a *admission.Attributes) error {
	pod, ok := newPod(a)
	if !ok || !isMirror(pod) {
		return nil
	}
	if pod.Spec.ServiceAccountName != "" {
		return forbidden(a, "a mirror pod may not reference service accounts")
	}
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		if v.Secret != nil {
			return forbidden(a, "a mirror pod may not reference secrets")
		}
		if v.Projected == nil {
			continue
		}
		for _, s := range v.Projected.Sources {
			switch {
			case s.Secret != nil:
				return forbidden(a, "a mirror pod may not reference secrets")
			case s.ServiceAccountToken != nil:
				return forbidden(a, "a mirror pod may not use ServiceAccountToken volume projections")
			}
		}
	}
	return nil
}

// account finds the ServiceAccount. The default one of a new namespace is
// made by a controller a moment after the namespace, so a client's request
// waits for it; controllers retry by themselves and do not.
func (ServiceAccount) account(ctx context.Context, a *admission.Attributes, name string) (*corev1.ServiceAccount, error) {
	const pause, attempts = 100 * time.Millisecond, 10
	for attempt := 1; ; attempt++ {
		obj, err := a.Read.Get(schema.GroupKind{Kind: "ServiceAccount"}, a.Namespace, name)
		if sa, ok := obj.(*corev1.ServiceAccount); ok && err == nil {
			return sa, nil
		}
		if err != nil && !apierrors.IsNotFound(err) {
			return nil, err
		}
		if name != defaultServiceAccount || a.User == "" || attempt == attempts {
			hint := ""
			if name == defaultServiceAccount {
				hint = " (it is created shortly after its namespace; retry)"
			}
			return nil, forbidden(a, "error looking up service account %s/%s: serviceaccount %q not found%s", a.Namespace, name, name, hint)
		}
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil, apierrors.NewTimeoutError("the request ended while it waited for the namespace's default service account", 1)
		case <-timer.C:
		}
	}
}

// automount: the pod's word counts before the account's.
func automount(sa *corev1.ServiceAccount, pod *corev1.Pod) bool {
	if pod.Spec.AutomountServiceAccountToken != nil {
		return *pod.Spec.AutomountServiceAccountToken
	}
	if sa.AutomountServiceAccountToken != nil {
		return *sa.AutomountServiceAccountToken
	}
	return true
}

// tokenVolumeName is the same for all pods of an account, unlike upstream's
// random one: replicas of one template then have byte-equal specs, which the
// store keeps once.
func tokenVolumeName(pod *corev1.Pod) string {
	sum := sha256.Sum256([]byte(pod.Spec.ServiceAccountName))
	return tokenVolumePrefix + hex.EncodeToString(sum[:])[:5]
}

// mountToken mounts the token volume into every container that has nothing
// at its path, and adds the volume if there is none yet.
func mountToken(pod *corev1.Pod) {
	name, have := tokenVolumeName(pod), false
	for i := range pod.Spec.Volumes {
		if strings.HasPrefix(pod.Spec.Volumes[i].Name, tokenVolumePrefix) {
			name, have = pod.Spec.Volumes[i].Name, true
			break
		}
	}
	needed := false
	for _, list := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range list {
			if !mountsAt(&list[i], tokenMountPath) {
				list[i].VolumeMounts = append(list[i].VolumeMounts, corev1.VolumeMount{Name: name, ReadOnly: true, MountPath: tokenMountPath})
				needed = true
			}
		}
	}
	if needed && !have {
		pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{Projected: tokenSource()}})
	}
}

func mountsAt(c *corev1.Container, path string) bool {
	for i := range c.VolumeMounts {
		if c.VolumeMounts[i].MountPath == path {
			return true
		}
	}
	return false
}

func tokenSource() *corev1.ProjectedVolumeSource {
	mode, seconds := corev1.ProjectedVolumeSourceDefaultMode, int64(tokenSeconds)
	return &corev1.ProjectedVolumeSource{
		DefaultMode: &mode,
		Sources: []corev1.VolumeProjection{
			{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "token", ExpirationSeconds: &seconds}},
			{ConfigMap: &corev1.ConfigMapProjection{
				LocalObjectReference: corev1.LocalObjectReference{Name: "kube-root-ca.crt"},
				Items:                []corev1.KeyToPath{{Key: "ca.crt", Path: "ca.crt"}},
			}},
			{DownwardAPI: &corev1.DownwardAPIProjection{Items: []corev1.DownwardAPIVolumeFile{
				{Path: "namespace", FieldRef: &corev1.ObjectFieldSelector{APIVersion: "v1", FieldPath: "metadata.namespace"}},
			}}},
		},
	}
}
