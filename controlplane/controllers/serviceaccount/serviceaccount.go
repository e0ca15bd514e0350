// Package serviceaccount gives each namespace what clients wait for: the
// ServiceAccount "default" and the ConfigMap kube-root-ca.crt.
//
// Owned fields: the existence of both, and the ConfigMap's data.
package serviceaccount

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

const (
	accountName = "default"
	rootCAName  = "kube-root-ca.crt"
	rootCAKey   = "ca.crt"
	description = "kubernetes.io/description"
	rootCAText  = "Contains a CA bundle that can be used to verify the API server of this cluster."
)

var (
	namespaceGK = schema.GroupKind{Kind: "Namespace"}
	accountGK   = schema.GroupKind{Kind: "ServiceAccount"}
	configMapGK = schema.GroupKind{Kind: "ConfigMap"}
)

// New makes the controller of the default ServiceAccounts.
func New(env loop.Env) *loop.Controller {
	return perNamespace(env, "serviceaccount", accountGK, accountName, func(ctx context.Context, ns string) error {
		_, err := env.Store.Get(accountGK, ns, accountName)
		if !apierrors.IsNotFound(err) {
			return err
		}
		return create(ctx, env, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: accountName}})
	})
}

// NewRootCA makes the controller of the kube-root-ca.crt ConfigMaps; pem is
// the cluster's CA.
func NewRootCA(env loop.Env, pem []byte) *loop.Controller {
	return perNamespace(env, "root-ca", configMapGK, rootCAName, func(ctx context.Context, ns string) error {
		obj, err := env.Store.Get(configMapGK, ns, rootCAName)
		if apierrors.IsNotFound(err) {
			return create(ctx, env, &corev1.ConfigMap{
				ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: rootCAName, Annotations: map[string]string{description: rootCAText}},
				Data:       map[string]string{rootCAKey: string(pem)},
			})
		}
		if err != nil {
			return err
		}
		if cm, ok := obj.(*corev1.ConfigMap); ok && cm.Data[rootCAKey] == string(pem) && len(cm.Data) == 1 {
			return nil
		}
		_, err = env.Store.Update(ctx, configMapGK, ns, rootCAName, registry.Main, func(cur runtime.Object) (runtime.Object, error) {
			cm, ok := cur.(*corev1.ConfigMap)
			if !ok {
				return nil, fmt.Errorf("%s is a %T", rootCAName, cur)
			}
			cm.Data = map[string]string{rootCAKey: string(pem)}
			return cm, nil
		}, env.Write())
		return err
	})
}

// perNamespace makes a controller whose keys are namespaces, and which looks
// again when its one object there is changed or deleted.
func perNamespace(env loop.Env, name string, gk schema.GroupKind, object string, ensure func(context.Context, string) error) *loop.Controller {
	return &loop.Controller{
		Name: name,
		Sources: []loop.Source{
			loop.Self(namespaceGK.String()),
			{Kind: gk.String(), Keys: func(ev state.Event, add func(state.Key)) {
				if k := ev.Record.Header.Key; k.Name == object && ev.Type != state.Added {
					add(state.Key{Kind: namespaceGK.String(), Name: k.Namespace})
				}
			}},
		},
		Reconcile: func(ctx context.Context, key state.Key) (time.Duration, error) {
			rec, ok := env.Reader.Snapshot().Get(key)
			if !ok || rec.Header.Deleted != 0 || rec.Header.Phase == string(corev1.NamespaceTerminating) {
				return 0, nil
			}
			if err := ensure(ctx, key.Name); err != nil {
				return 0, fmt.Errorf("ensure %s in namespace %s: %w", object, key.Name, err)
			}
			return 0, nil
		},
	}
}

func create(ctx context.Context, env loop.Env, obj runtime.Object) error {
	_, err := env.Store.Create(ctx, obj, env.Write())
	switch {
	case apierrors.IsAlreadyExists(err):
		return loop.ErrMoved // somebody else's, which may be wrong
	case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
		return nil
	}
	var status *apierrors.StatusError
	if errors.As(err, &status) && apierrors.IsNotFound(err) {
		return nil // the namespace went meanwhile
	}
	return err
}
