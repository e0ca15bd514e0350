package reviews

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/dunlin-project/dunlin/controlplane/api/auth"
)

func (c Config) self(ctx context.Context, _, _ string, obj runtime.Object) (runtime.Object, error) {
	o, ok := obj.(*authenticationv1.SelfSubjectReview)
	if !ok {
		return nil, wrongType(obj)
	}
	u, ok := auth.UserFrom(ctx)
	if !ok {
		return nil, apierrors.NewBadRequest("no user present on request")
	}
	o.CreationTimestamp = metav1.NewTime(c.Clock.Now())
	o.Status.UserInfo = userInfo(u)
	return o, nil
}

func userInfo(u *auth.User) authenticationv1.UserInfo {
	info := authenticationv1.UserInfo{Username: u.Name, UID: u.UID, Groups: u.Groups}
	for k, v := range u.Extra {
		if info.Extra == nil {
			info.Extra = map[string]authenticationv1.ExtraValue{}
		}
		info.Extra[k] = v
	}
	return info
}

func (c Config) token(_ context.Context, _, _ string, obj runtime.Object) (runtime.Object, error) {
	o, ok := obj.(*authenticationv1.TokenReview)
	if !ok {
		return nil, wrongType(obj)
	}
	if o.Namespace != "" {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("namespace is not allowed on this type: %v", o.Namespace))
	}
	if o.Spec.Token == "" {
		return nil, apierrors.NewBadRequest("token is required for TokenReview in authentication")
	}
	o.Status = authenticationv1.TokenReviewStatus{}
	u, audiences, ok, err := c.Tokens.AuthenticateToken(o.Spec.Token, o.Spec.Audiences)
	switch {
	case err != nil:
		o.Status.Error = err.Error()
	case !ok:
		o.Status.Error = auth.ErrUnknownToken.Error()
	default:
		o.Status.Authenticated = true
		o.Status.User = userInfo(u)
		o.Status.Audiences = audiences
	}
	return o, nil
}

// Bounds of a token's lifetime, seconds, as upstream has them.
const (
	defaultLifetime = 60 * 60
	minLifetime     = 10 * 60
	maxLifetime     = 1 << 32
)

var tokenRequestKind = schema.GroupKind{Group: authenticationv1.GroupName, Kind: "TokenRequest"}

// checkTokenRequest validates what does not depend on other objects.
func checkTokenRequest(o *authenticationv1.TokenRequest, namespace, name string) field.ErrorList {
	var errs field.ErrorList
	if o.Name != "" && o.Name != name {
		errs = append(errs, field.Invalid(field.NewPath("metadata", "name"), o.Name, "must match the service account name if specified"))
	}
	if o.Namespace != "" && o.Namespace != namespace {
		errs = append(errs, field.Invalid(field.NewPath("metadata", "namespace"), o.Namespace, "must match the service account namespace if specified"))
	}
	path := field.NewPath("spec", "expirationSeconds")
	switch s := *o.Spec.ExpirationSeconds; {
	case s < minLifetime:
		errs = append(errs, field.Invalid(path, s, "may not specify a duration less than 10 minutes"))
	case s > maxLifetime:
		errs = append(errs, field.Invalid(path, s, "may not specify a duration larger than 2^32 seconds"))
	}
	return errs
}

func (c Config) tokenRequest(_ context.Context, namespace, name string, obj runtime.Object) (runtime.Object, error) {
	o, ok := obj.(*authenticationv1.TokenRequest)
	if !ok {
		return nil, wrongType(obj)
	}
	if o.Spec.ExpirationSeconds == nil {
		seconds := int64(defaultLifetime)
		o.Spec.ExpirationSeconds = &seconds
	}
	if err := invalid(tokenRequestKind, checkTokenRequest(o, namespace, name)); err != nil {
		return nil, err
	}
	found, err := c.Objects.Get(schema.GroupKind{Kind: "ServiceAccount"}, namespace, name)
	if err != nil {
		return nil, err
	}
	sa, ok := found.(*corev1.ServiceAccount)
	if !ok {
		return nil, apierrors.NewInternalError(fmt.Errorf("reviews: %T is no ServiceAccount", found))
	}
	if o.UID != "" && o.UID != sa.UID {
		return nil, apierrors.NewConflict(schema.GroupResource{Group: authenticationv1.GroupName, Resource: "TokenRequest"}, name,
			fmt.Errorf("the UID in the token request (%s) does not match the UID of the service account (%s)", o.UID, sa.UID))
	}
	bound, node, err := c.bound(namespace, name, o.Spec.BoundObjectRef)
	if err != nil {
		return nil, err
	}
	if len(o.Spec.Audiences) == 0 {
		o.Spec.Audiences = c.Issuer.Audiences()
	}
	token, expires, err := c.Issuer.Issue(sa, bound, node, o.Spec.Audiences, time.Duration(*o.Spec.ExpirationSeconds)*time.Second)
	if err != nil {
		return nil, apierrors.NewInternalError(err)
	}
	o.Name, o.Namespace, o.UID = sa.Name, sa.Namespace, sa.UID
	o.CreationTimestamp = metav1.NewTime(c.Clock.Now())
	o.Status = authenticationv1.TokenRequestStatus{Token: token, ExpirationTimestamp: metav1.NewTime(expires)}
	return o, nil
}

// bound finds what the token is to be bound to, and, for a pod, its node.
func (c Config) bound(namespace, serviceAccount string, ref *authenticationv1.BoundObjectReference) (runtime.Object, *auth.Ref, error) {
	if ref == nil {
		return nil, nil, nil
	}
	gvk := schema.FromAPIVersionAndKind(ref.APIVersion, ref.Kind)
	var obj runtime.Object
	var uid types.UID
	var node *auth.Ref
	var err error
	switch {
	case gvk.Group == "" && gvk.Kind == "Pod":
		var pod *corev1.Pod
		if pod, err = get[*corev1.Pod](c, "Pod", namespace, ref.Name); err != nil {
			return nil, nil, err
		}
		if pod.Spec.ServiceAccountName != serviceAccount {
			return nil, nil, apierrors.NewBadRequest(fmt.Sprintf("cannot bind token for serviceaccount %q to pod running with different serviceaccount name.", serviceAccount))
		}
		obj, uid, node = pod, pod.UID, c.nodeOf(pod)
	case gvk.Group == "" && gvk.Kind == "Secret":
		var secret *corev1.Secret
		if secret, err = get[*corev1.Secret](c, "Secret", namespace, ref.Name); err != nil {
			return nil, nil, err
		}
		obj, uid = secret, secret.UID
	case gvk.Group == "" && gvk.Kind == "Node":
		var n *corev1.Node
		if n, err = get[*corev1.Node](c, "Node", "", ref.Name); err != nil {
			return nil, nil, err
		}
		obj, uid = n, n.UID
	default:
		return nil, nil, apierrors.NewBadRequest(fmt.Sprintf("cannot bind token to object of type %s", gvk.String()))
	}
	if ref.UID != "" && ref.UID != uid {
		return nil, nil, apierrors.NewConflict(schema.GroupResource{Group: gvk.Group, Resource: strings.ToLower(gvk.Kind) + "s"}, ref.Name,
			fmt.Errorf("the UID in the bound object reference (%s) does not match the UID in record. The object might have been deleted and then recreated", ref.UID))
	}
	return obj, node, nil
}

func get[T runtime.Object](c Config, kind, namespace, name string) (T, error) {
	var zero T
	obj, err := c.Objects.Get(schema.GroupKind{Kind: kind}, namespace, name)
	if err != nil {
		return zero, err
	}
	t, ok := obj.(T)
	if !ok {
		return zero, apierrors.NewInternalError(errors.New("reviews: the store returned another kind than asked"))
	}
	return t, nil
}

// nodeOf names the pod's node for the token's claims; a node that is gone is
// named without its uid.
func (c Config) nodeOf(pod *corev1.Pod) *auth.Ref {
	if pod.Spec.NodeName == "" {
		return nil
	}
	ref := &auth.Ref{Name: pod.Spec.NodeName}
	if n, err := get[*corev1.Node](c, "Node", "", pod.Spec.NodeName); err == nil {
		ref.UID = string(n.UID)
	}
	return ref
}
