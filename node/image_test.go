package node

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dunlin-project/dunlin/runtime/workload"
	"github.com/dunlin-project/dunlin/wire"
)

func (b *bed) told(reason, text string) bool {
	b.t.Helper()
	return slices.ContainsFunc(b.link.events, func(e wire.EventReport) bool { return e.Reason == reason && strings.Contains(e.Message, text) })
}

// TestPullingIsTold: a pod whose image is on its way, or is used as it is since
// no registry answers, says so in its events.
func TestPullingIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		b.rt.tells = []string{workload.Pulling + "35.0 MiB of 100.0 MiB, 80.0 KiB/s", workload.Kept + "no answer of r.lan"}
		b.rt.onPrepare = func(string) (workload.ImageState, error) {
			time.Sleep(4 * time.Minute)
			return workload.ImageState{Digest: "sha256:d"}, nil
		}
		b.link.put("Pod", wasmPod("a"))
		b.start()
		defer b.stop()
		b.after(time.Minute)
		if !b.told("Pulling", `Pulling image "app.wasm": 35.0 MiB of 100.0 MiB, 80.0 KiB/s`) || !b.told("RegistryUnreachable", "no answer of r.lan") {
			t.Fatalf("events %+v", b.link.events)
		}
		b.after(4 * time.Minute)
		b.want("uid-a", "Running+Ready")
	})
}

// TestRetryAfterIsKept: a registry that asks to wait is not asked before, and
// the back-off that would be shorter does not count.
func TestRetryAfterIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		var tries atomic.Int64
		b.rt.onPrepare = func(string) (workload.ImageState, error) {
			if tries.Add(1) == 1 {
				return workload.ImageState{}, &workload.StartError{Reason: "ErrImagePull", Message: "429", RetryAfter: 7 * time.Minute}
			}
			return workload.ImageState{Digest: "sha256:d"}, nil
		}
		b.link.put("Pod", wasmPod("a"))
		b.start()
		defer b.stop()
		b.after(7*time.Minute - 5*time.Second)
		if n := tries.Load(); n != 1 {
			t.Fatalf("%d tries before it may be asked again", n)
		}
		b.after(30 * time.Second)
		b.want("uid-a", "Running+Ready")
	})
}

// TestPullSecretsReachTheRegistry: what the pod's secrets say goes to whoever
// pulls; one that is missing or damaged is told and keeps nobody from trying.
func TestPullSecretsReachTheRegistry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		var got atomic.Value
		b.rt.onRequest = func(_ context.Context, req workload.ImageRequest) error {
			if req.Policy == string(corev1.PullNever) {
				return &workload.StartError{Reason: "ErrImageNeverPull", Message: "not on this node"}
			}
			got.Store(req.Credentials)
			if len(req.Credentials) < 2 {
				return errors.New("401 Unauthorized")
			}
			return nil
		}
		secret := func(name, key, content string) {
			b.link.put("Secret", &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid-" + name)}, Data: map[string][]byte{key: []byte(content)}})
		}
		secret("new", corev1.DockerConfigJsonKey, `{"auths":{"r.lan":{"username":"u","password":"new"}}}`)
		secret("old", corev1.DockerConfigKey, `{"r.lan":{"username":"u","password":"old"}}`)
		secret("torn", corev1.DockerConfigJsonKey, `{"auths":`)
		secret("opaque", "password", "x")
		b.link.put("Pod", wasmPod("a", func(p *corev1.Pod) {
			p.Spec.Containers[0].Image = "r.lan/app:1"
			for _, n := range []string{"missing", "torn", "opaque", "new", "old"} {
				p.Spec.ImagePullSecrets = append(p.Spec.ImagePullSecrets, corev1.LocalObjectReference{Name: n})
			}
		}))
		b.start()
		defer b.stop()
		b.after(time.Minute)
		b.want("uid-a", "Running+Ready")
		creds, _ := got.Load().([]workload.RegistryCredential)
		if len(creds) != 2 || creds[0].Password != "new" || creds[1].Password != "old" {
			t.Errorf("%d credentials", len(creds))
		}
		for name, why := range map[string]string{"missing": "there is no secret", "torn": "key .dockerconfigjson"} {
			if !b.told("FailedToRetrieveImagePullSecret", `"`+name+`" cannot be used: `+why) {
				t.Errorf("%s: %+v", name, b.link.events)
			}
		}
	})
}
